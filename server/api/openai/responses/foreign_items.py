"""Items that this server never makes, in conversations that began at another server.

Calls of tools are rendered if their result has text. Other items are left out of the prompt, and named in the Warning
header. All of them are stored as they came.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.api.openai.tools import CalledFunction, MessageToolCall
from quire.server.prompt.foreign import is_given, readable
from quire.server.values import Json

_Field = msgspec.Raw | UnsetType


class _Call(NamedTuple):
    """The tool of a call, and the fields with its arguments and its results. `tool` None: the item names the tool. No
    `results`: the client answers with an item of `OUTPUTS`.
    """

    tool: str | None
    arguments: str
    results: tuple[str, ...] = ()


_CALLS = {
    "local_shell_call": _Call("local_shell", "action"),
    "shell_call": _Call("shell", "action"),
    "apply_patch_call": _Call("apply_patch", "operation"),
    "program": _Call("program", "code"),
    "web_search_call": _Call("web_search", "action", ("results",)),
    "file_search_call": _Call("file_search", "queries", ("results",)),
    "code_interpreter_call": _Call("code_interpreter", "code", ("outputs",)),
    "mcp_call": _Call(None, "arguments", ("output", "error")),
}
OUTPUTS = {  # the items with their results
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "program_output": "result",
}
_WITHOUT_TEXT = re.compile(
    r"mcp_\w+|compaction\w*|additional_tools|configuration_update|agent_message|multi_agent\w*|tool_search\w*"
    r"|\w+_call(_output)?"
)
OWN_TEXT = "quire1."  # begins the `encrypted_content` of this server's thoughts and summaries
_SUPPORTED = frozenset({"function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"})


class ForeignFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Fields of such items alone. A field that is rendered is read then."""

    acknowledged_safety_checks: _Field = UNSET
    action: _Field = UNSET
    actions: _Field = UNSET
    agent: _Field = UNSET
    approval_request_id: _Field = UNSET
    approve: _Field = UNSET
    author: _Field = UNSET
    background: _Field = UNSET
    code: _Field = UNSET
    container_id: _Field = UNSET
    environment: _Field = UNSET
    error: _Field = UNSET
    execution: _Field = UNSET
    fingerprint: _Field = UNSET
    max_output_length: _Field = UNSET
    operation: _Field = UNSET
    output_format: _Field = UNSET
    outputs: _Field = UNSET
    pending_safety_checks: _Field = UNSET
    quality: _Field = UNSET
    queries: _Field = UNSET
    reason: _Field = UNSET
    reasoning: _Field = UNSET
    recipient: _Field = UNSET
    result: _Field = UNSET
    results: _Field = UNSET
    revised_prompt: _Field = UNSET
    server_label: _Field = UNSET
    size: _Field = UNSET
    svg_usage: _Field = UNSET
    text: _Field = UNSET
    tools: _Field = UNSET


class Item(Protocol):
    """The part of `InputItem` that every item has, to which `ForeignFields` belong."""

    type: str | None
    id: str | None
    call_id: str | None
    name: str | None
    content: object
    summary: object
    encrypted_content: str | None
    arguments: str | dict[str, Json] | None
    output: object
    status: str | None


def is_left_out(item: Item) -> bool:
    """Return whether the prompt lacks the item."""
    kind = item.type or "message"
    if (call := _CALLS.get(kind)) is not None:
        return bool(call.results) and _result_field(item, call) is None
    own = (item.encrypted_content or "").startswith(OWN_TEXT)
    if kind == "reasoning":
        return not (item.content or item.summary or own)
    if kind == "compaction":
        return not own
    return kind not in OUTPUTS and kind not in _SUPPORTED and _WITHOUT_TEXT.fullmatch(kind) is not None


def is_call(kind: str) -> bool:
    """Return whether items of a type are rendered as a call."""
    return kind in _CALLS


def called_as(kind: str, call_id: str | None, item_id: str | None) -> set[str | None]:
    """Return the ids by which a call's output may refer to an item: a local shell's output has the item's."""
    if kind == "local_shell_call":
        return {call_id, item_id}
    return {call_id} if kind.endswith("_call") or kind in _CALLS else set()


def call_of(item: Item) -> MessageToolCall:
    """Return an item as a call."""
    call = _CALLS[item.type]
    given = getattr(item, call.arguments)
    if isinstance(given, msgspec.Raw):
        given = bytes(given).decode() if is_given(given) else None
        if given and call.arguments in ("code", "queries"):  # the arguments of a call must be an object
            given = f'{{"{call.arguments}": {given}}}'
    function = CalledFunction(name=call.tool or item.name or "", arguments=given or "{}")
    return MessageToolCall(id=item.call_id or item.id or item.type, function=function)


def result_of(item: Item, path: str) -> str | None:
    """Return the result in the item of a call; None if a separate item has it. Raises BadRequest."""
    field = _result_field(item, _CALLS[item.type])
    if field is None:
        return None
    text = _text(getattr(item, field), f"{path}.{field}")
    return f"Error: {text}" if field == "error" else text


def output_of(item: Item, path: str) -> str:
    """Return the result in the item of an output; its status if it has no text. Raises BadRequest."""
    field = OUTPUTS[item.type]
    return _text(getattr(item, field), f"{path}.{field}") or item.status or ""


def _text(given: object, path: str) -> str:
    """Return the text of a field that holds a result. Raises BadRequest."""
    if not given or isinstance(given, str):
        return given or ""
    return readable(given if isinstance(given, msgspec.Raw) else msgspec.Raw(msgspec.json.encode(given)), path)


def _result_field(item: Item, call: _Call) -> str | None:
    """Return the field with the result of a call; None if there is none yet."""
    for field in call.results:
        given = getattr(item, field)
        if given and (not isinstance(given, msgspec.Raw) or (is_given(given) and bytes(given) != b"[]")):
            return field
    return None
