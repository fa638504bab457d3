"""Anthropic's requests -> `GenerationSpec`. Raises BadRequest for requests that no model can serve."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.api.anthropic import foreign_blocks
from quire.server.api.anthropic.foreign_blocks import Compaction, Document, ForeignCall, ForeignResult, SearchResult
from quire.server.api.anthropic.protocol import (
    Base64Source,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResult,
    ToolUse,
)
from quire.server.errors import BadRequest
from quire.server.generate.transfer import read_transfer
from quire.server.http.parse_body import MAX_NESTING, deeper_than
from quire.server.media.inputs import MediaInput
from quire.server.request import tools as neutral
from quire.server.request.request import Conversation, GenerationSpec, options_of
from quire.server.structured.structure import Structure
from quire.server.values import Json

_OF_USER = (ImageBlock, Document, SearchResult)


def spec(body: MessagesRequest, thinks: bool, **identity: Json) -> GenerationSpec:
    """Return the spec. `thinks`: the model can think. `identity`: request_id, priority, tenant, background."""
    return GenerationSpec(
        prompts=conversation(body, thinks),
        options=options_of(body, stop=body.stop_sequences),
        structure=_structure(body),
        cache_salt=body.cache_salt,
        prompt_param="messages",
        transfer=read_transfer(body.kv_transfer_params),
        clip_max_tokens=True,  # max_tokens is mandatory, and clients send the limit of their model
        **identity,
    )


def conversation(body: PromptFields, thinks: bool) -> Conversation:
    """Return the prompt of a request."""
    messages = [_system(body)] if body.system else []
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{i}")
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ())]
    return Conversation(
        messages,
        continue_final_message=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        tools=tools,
        tool_choice=_choice(body, tools),
        reasoning=_reasoning(body, thinks),
    )


def _system(body: PromptFields) -> dict[str, Any]:
    return {"role": "system", "content": _text(body.system)}


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


# blocks, and their paths in the request
Illustrated = list[tuple[TextBlock | ImageBlock | Document | SearchResult, str]]


def _content(blocks: Illustrated) -> str | list[dict[str, Any]]:
    """Return one text, or the parts of a content with images; texts that follow each other are one part."""
    parts: list[dict[str, Any]] = []
    for block, path in blocks:
        if isinstance(block, ImageBlock):
            parts.append({"type": "image", "image": _image(block, path)})
            continue
        text = block.text if isinstance(block, TextBlock) else foreign_blocks.text_of(block, path)
        if parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += f"\n{text}"
        else:
            parts.append({"type": "text", "text": text})
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _image(block: ImageBlock, path: str) -> MediaInput:
    source = block.source
    if isinstance(source, Base64Source):
        return MediaInput(param=f"{path}.source.data", base64=source.data)
    return MediaInput(param=f"{path}.source.url", url=source.url)


def _result(result: ToolResult, path: str) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result; a failure begins with "Error: "."""
    if isinstance(result.content, list):
        left_out = result.unread()
        blocks = [(block, f"{path}.content.{i}") for i, block in enumerate(result.content) if i not in left_out]
        content = _content(blocks) if blocks else ""
    else:
        content = result.content or ""
    if not result.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error: "}, *content]


def _messages(message: InputMessage, path: str) -> list[dict[str, Any]]:
    """Return a message as templates expect it; results of tools become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return _assistant(message, path) if message.role == "assistant" else _user(message, path)


def _user(message: InputMessage, path: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    segment: Illustrated = []

    def flush() -> None:
        if segment:
            out.append({"role": message.role, "content": _content(segment)})
            segment.clear()

    left_out = message.unread()
    for i, block in enumerate(message.content):
        where = f"{path}.content.{i}"
        if i in left_out:
            continue
        if isinstance(block, TextBlock) or (isinstance(block, _OF_USER) and message.role == "user"):
            segment.append((block, where))
        elif isinstance(block, ToolResult) and message.role == "user":
            flush()
            result = _result(block, where)
            out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        else:
            raise _misplaced(block, message.role, where)
    flush()
    return out or [{"role": message.role, "content": ""}]


def _assistant(message: InputMessage, path: str) -> list[dict[str, Any]]:
    """Return a message of the assistant; results of tools that its server ran end one message, and start the next."""
    left_out, out, turn = message.unread(), [], _Turn()
    for i, block in enumerate(message.content):
        where = f"{path}.content.{i}"
        if i in left_out:
            continue
        if isinstance(block, ForeignResult):
            turn.calls.append(foreign_blocks.call_of(turn.pending.pop(block.tool_use_id, None), block))
            result = foreign_blocks.result_of(block, where)
            out += [turn.message(), {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}]
            turn = _Turn(turn.pending)
        elif not turn.take(block, where):
            raise _misplaced(block, message.role, where)
    return out if out and turn.is_empty else [*out, turn.message()]


class _Turn:
    """A message of the assistant as templates expect it. `pending` are calls whose results come later in the same
    message of the request.
    """

    def __init__(self, pending: dict[str, ForeignCall] | None = None):
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.thoughts: list[str] = []
        self.pending = pending or {}

    @property
    def is_empty(self) -> bool:
        return not (self.texts or self.calls or self.thoughts)

    def take(self, block: msgspec.Struct, path: str) -> bool:
        """Add a block; return whether the assistant may have such a block. Raises BadRequest."""
        match block:
            case TextBlock():
                self.texts.append(block.text)
            case Compaction():
                self.texts.append(block.content)
            case ThinkingBlock():
                self.thoughts.append(block.thinking)
            case ToolUse():
                _check_nesting(block.input, path)
                function = {"name": block.name, "arguments": block.input}
                self.calls.append({"id": block.id, "type": "function", "function": function})
            case ForeignCall():
                _check_nesting(block.input, path)
                self.pending[block.id] = block
            case _:
                return False
        return True

    def message(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": "assistant", "content": "\n".join(self.texts)}
        if self.thoughts:
            out["reasoning_content"] = out["reasoning"] = "\n".join(self.thoughts)
        if self.calls:
            out["tool_calls"] = self.calls
        return out


def _check_nesting(value: Json, path: str) -> None:
    if deeper_than(value, MAX_NESTING):
        raise BadRequest(f"{path}.input is nested more than {MAX_NESTING} levels deep.", param=f"{path}.input")


def _misplaced(block: msgspec.Struct, role: str, path: str) -> BadRequest:
    kind = foreign_blocks.kind_of(block)
    return BadRequest(f"{path}: a message of role {role} has no {kind} block.", param=path)


def _tool(tool: Tool, path: str) -> neutral.Tool:
    if tool.type not in (None, "custom"):
        raise BadRequest(f"{path}.type: this server runs no tools of type '{tool.type[:100]}'.", param=f"{path}.type")
    if deeper_than(tool.input_schema, MAX_NESTING):
        raise BadRequest(
            f"{path}.input_schema is nested more than {MAX_NESTING} levels deep.", param=f"{path}.input_schema"
        )
    neutral.require_object(tool.input_schema, f"{path}.input_schema")
    return neutral.Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


def _choice(body: PromptFields, tools: list[neutral.Tool]) -> neutral.ToolChoice:
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadRequest("tools: two tools have the same name.", param="tools")
    choice = body.tool_choice
    if choice is None:
        return neutral.ToolChoice("auto" if tools else "none")
    if choice.type == "none":
        return neutral.ToolChoice("none")
    if not tools:
        raise BadRequest("tool_choice is only allowed when tools are given.", param="tool_choice")
    parallel = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return neutral.ToolChoice("required" if choice.type == "any" else "auto", None, parallel)
    if choice.name not in names:
        raise BadRequest(f"tool_choice.name: there is no tool '{choice.name}' in tools.", param="tool_choice.name")
    return neutral.ToolChoice("required", frozenset({choice.name}), False)


def _reasoning(body: PromptFields, thinks: bool) -> neutral.Reasoning:
    """Return the thinking settings. A budget is a maximum, which a model that does not think also meets."""
    effort = body.output_config and body.output_config.effort
    thinking = body.thinking
    if thinking is None or not thinks:
        return neutral.Reasoning(effort=effort if thinks else None)
    if thinking.type == "disabled":
        return neutral.Reasoning(enabled=False)
    return neutral.Reasoning(effort, thinking.budget_tokens, enabled=True)


def _structure(body: MessagesRequest) -> Structure | None:
    given = (body.output_config and body.output_config.format) or body.output_format
    return given and Structure(kind="json_schema", value=given.schema, param="output_config.format.schema")
