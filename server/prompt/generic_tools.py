"""Tools for a model whose chat template prints none: described in a system message, with calls and results as text
(--generic-tool-prompt). Calls have the form of the parser `json`: an array.
"""

from __future__ import annotations

import json
from typing import Any

_INTRODUCTION = """\
You can call these functions, each described by one line of JSON:
{tools}
To call some of them, answer with nothing but a JSON array of calls:
[{{"name": "the function's name", "arguments": {{...}}}}]
The results come in the next message. If no call is needed, answer in plain text."""


def with_generic_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as a template without tools takes them: a system message first, no calls, no role `tool`."""
    plain = _joined(messages)
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    if plain and plain[0]["role"] == "system":
        first, *plain = plain
        introduction = f"{_text(first)}\n\n{introduction}"
    return [{"role": "system", "content": introduction}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        name = f" of {message['name']}" if "name" in message else ""
        return {"role": "user", "content": f"Result{name}: {_text(message)}"}
    if "tool_calls" not in message:
        return message
    calls = ", ".join(_call(call["function"]) for call in message["tool_calls"])
    return {"role": message["role"], "content": "\n".join(filter(None, [_text(message), f"[{calls}]"]))}


def _call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {arguments or "{}"}}}'


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write calls and results as text. Join results with the user's adjacent text into one message: many templates want
    alternating user and assistant messages.
    """
    out: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result, plain = message["role"] == "tool", _plain(message)
        last = out[-1] if out else {}
        of_user = plain["role"] == last.get("role") == "user" and (is_result or after_result)
        if of_user and isinstance(plain["content"], str) and isinstance(last["content"], str):
            out[-1] = {**last, "content": f"{last['content']}\n{plain['content']}"}
        else:
            out.append(plain)
        after_result = is_result
    return out


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
