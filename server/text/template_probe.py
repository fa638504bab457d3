"""Capabilities of a chat template, found by rendering short conversations: tools, calls, results and their form, and
system messages after the first one.

Templates differ in the forms they take (arguments as an object or as text, ids of nine characters, `null` content) and
do not declare them; a template that cannot print something usually omits it without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

TOOL = {
    "type": "function",
    "function": {
        "name": "qztool",
        "description": "qzdescription",
        "parameters": {
            "type": "object",
            "properties": {"qzkey": {"type": "string", "description": "qz"}},
            "required": ["qzkey"],
        },
    },
}
ARGUMENTS = {"qzkey": "qzvalue"}
LONG_ID, SHORT_ID = "call_qzprobe01", "qzprobe01"

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str | None]  # None: the template fails


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """A template's rendering of tools. The last three are the form in which it takes calls; they are meaningless
    without `calls`.
    """

    tools: bool  # prints the tools
    calls: bool  # prints calls and their results, or results only: these templates leave calls out
    arguments_as_object: bool = True  # else as JSON text
    no_content: Literal["missing", "null", "empty"] = "missing"  # for a message that has calls only
    short_ids: bool = False  # ids must have nine letters or digits


def probe_tools(render: Render, source: str) -> ToolSupport:
    """Return the support for tools. A template that fails on the probes counts as one that prints what its `source`
    names: in a real conversation its own error message tells what is missing.
    """
    user = {"role": "user", "content": "qzask"}
    printed = render([user], [TOOL])
    tools = "tools" in source if printed is None else "qztool" in printed
    failed_always, results_only = True, None
    for support, conversation in _variants(user, tools):
        text = render(conversation, [TOOL])
        failed_always &= text is None
        if text is not None and _prints_call(text, support):
            return support
        if results_only is None and text is not None and _prints_result(text):
            results_only = support
    if "tool" not in source:
        return ToolSupport(tools, calls=False)
    return results_only or ToolSupport(tools, calls=failed_always)


def probe_systems(render: Render) -> bool:
    """Return whether a template prints several system messages at the beginning, and later ones. A template that fails
    without any system message cannot be judged.
    """
    first, second = ({"role": "system", "content": text} for text in ("qzfirst", "qzsecond"))
    user, answer = {"role": "user", "content": "qzask"}, {"role": "assistant", "content": "qzanswer"}
    for conversation in ([first, second, user], [user, second], [user, answer, second, user]):
        text = render(conversation, None)
        if text is None or any(message["content"] not in text for message in conversation):
            return render([user], None) is None
    return True


def _variants(user: dict[str, Any], tools: bool) -> Iterator[tuple[ToolSupport, list[dict[str, Any]]]]:
    # in the order of preference: first what transformers would pass
    for short_ids, as_object, no_content in product((False, True), (True, False), ("missing", "null", "empty")):
        call_id = SHORT_ID if short_ids else LONG_ID
        arguments = ARGUMENTS if as_object else json.dumps(ARGUMENTS)
        call = {"id": call_id, "type": "function", "function": {"name": "qztool", "arguments": arguments}}
        conversation = [
            user,
            with_no_content({"role": "assistant", "tool_calls": [call]}, no_content),
            {"role": "tool", "tool_call_id": call_id, "name": "qztool", "content": "qzresult"},
        ]
        yield ToolSupport(tools, True, as_object, no_content, short_ids), conversation


def with_no_content(message: dict[str, Any], form: str) -> dict[str, Any]:
    """Return `message`, without content, in the form that a template takes (`ToolSupport.no_content`)."""
    return message if form == "missing" else {**message, "content": None if form == "null" else ""}


def _prints_result(text: str) -> bool:
    """Return whether the text has the result without the call."""
    call = text[text.rfind("qzask") :]
    return "qzresult" in call and not any(word in call for word in ("qzvalue", "None", "null"))


def _prints_call(text: str, support: ToolSupport) -> bool:
    """Return whether the text has the call as the model would write it: no Python repr, no doubly quoted JSON text."""
    call = text[text.rfind("qzask") :]
    wrong = ["'qzkey'", '\\"qzkey'] + ["None"] * (support.no_content == "null")
    return "qzvalue" in call and "qzresult" in call and not any(form in call for form in wrong)
