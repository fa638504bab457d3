"""Conversations as the text the model sees.

The same text as `chat_template.jinja` makes (a test compares them), with the parts that the model must write marked.
"""

from __future__ import annotations

import json
from typing import Any

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKER_TOKENS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def tool_line(tool: dict[str, Any]) -> str:
    """`name(parameter: type, other?: "a"|"b"): description`, the whole of a tool definition that fits a small model."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    shown = []
    for name, schema in (parameters.get("properties") or {}).items():
        kind = (
            "|".join(json.dumps(v, ensure_ascii=False) for v in schema["enum"])
            if schema.get("enum")
            else schema.get("type", "any")
        )
        shown.append(f"{name}{'' if name in required else '?'}: {kind}")
    description = f": {function['description']}" if function.get("description") else ""
    return f"{function['name']}({', '.join(shown)}){description}"


def tool_call_text(tool_call: dict[str, Any]) -> str:
    function = tool_call.get("function", tool_call)
    arguments = function["arguments"]
    return (
        '<tool_call>\n{"name": "'
        + function["name"]
        + '", "arguments": '
        + (arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        + "}\n</tool_call>"
    )


def render(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = False
) -> list[tuple[str, bool]]:
    """Pieces of text in order, each with whether the model is to write it (and so to be trained on it)."""
    parts: list[tuple[str, bool]] = []
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    if system or tools:
        block = "<tools>\n" + "".join(tool_line(t) + "\n" for t in tools) + "</tools>" if tools else ""
        parts.append((f"<|im_start|>system\n{system}{chr(10) if system and block else ''}{block}<|im_end|>\n", False))
    body = messages[1:] if messages and messages[0]["role"] == "system" else messages
    for i, message in enumerate(body):
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            if i == 0 or body[i - 1]["role"] != "tool":
                parts.append(("<|im_start|>user\n", False))
            parts.append((f"<tool_response>{content}</tool_response>", False))
            if i + 1 == len(body) or body[i + 1]["role"] != "tool":
                parts.append(("<|im_end|>\n", False))
            continue
        parts.append((f"<|im_start|>{role}\n", False))
        calls = "\n".join(tool_call_text(c) for c in message.get("tool_calls") or [])
        parts.append((f"{content}{chr(10) if content and calls else ''}{calls}<|im_end|>", role == "assistant"))
        parts.append(("\n", False))
    if add_generation_prompt:
        parts.append(("<|im_start|>assistant\n", False))
    return parts
