"""Anthropic's requests -> `GenerationSpec`. Raises BadRequest for requests that no model can serve."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.api.anthropic.protocol import (
    Base64Source,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    PromptFields,
    RedactedThinking,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResult,
    ToolUse,
)
from quire.server.errors import BadRequest
from quire.server.http.parse_body import MAX_NESTING, deeper_than
from quire.server.media.inputs import ImageInput
from quire.server.request import tools as neutral
from quire.server.request.request import Conversation, GenerationOptions, GenerationSpec
from quire.server.structured.structure import Structure
from quire.server.values import Json


def spec(body: MessagesRequest, thinks: bool, **identity: Json) -> GenerationSpec:
    """`thinks`: whether the model can think before it answers. `identity`: request_id, priority, tenant, background."""
    return GenerationSpec(
        prompts=conversation(body, thinks),
        options=GenerationOptions(
            max_tokens=body.max_tokens,
            stop=body.stop_sequences or None,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            speculation=body.speculation,
        ),
        structure=_structure(body),
        cache_salt=body.cache_salt,
        prompt_param="messages",
        clip_max_tokens=True,  # max_tokens is mandatory, and clients send their model's
        **identity,
    )


def conversation(body: PromptFields, thinks: bool) -> Conversation:
    """The prompt of a request."""
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


Illustrated = list[tuple[TextBlock | ImageBlock, str]]  # blocks, and where in the request they are


def _content(blocks: Illustrated) -> str | list[dict[str, Any]]:
    """One text, or the parts of a content with images; texts that follow each other are one part."""
    parts: list[dict[str, Any]] = []
    for block, path in blocks:
        if isinstance(block, ImageBlock):
            parts.append({"type": "image", "image": _image(block, path)})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += f"\n{block.text}"
        else:
            parts.append({"type": "text", "text": block.text})
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _image(block: ImageBlock, path: str) -> ImageInput:
    source = block.source
    if isinstance(source, Base64Source):
        return ImageInput(param=f"{path}.source.data", base64=source.data)
    return ImageInput(param=f"{path}.source.url", url=source.url)


def _result(result: ToolResult, path: str) -> str | list[dict[str, Any]]:
    """The content of a tool's result; that of a failure begins with "Error: "."""
    if isinstance(result.content, list) and result.content:
        content = _content([(block, f"{path}.content.{i}") for i, block in enumerate(result.content)])
    else:
        content = result.content or ""
    if not result.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error: "}, *content]


def _messages(message: InputMessage, path: str) -> list[dict[str, Any]]:
    """A message as templates expect it; results of tools become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return _assistant(message, path) if message.role == "assistant" else _user(message, path)


def _user(message: InputMessage, path: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    said: Illustrated = []

    def flush() -> None:
        if said:
            out.append({"role": message.role, "content": _content(said)})
            said.clear()

    for i, block in enumerate(message.content):
        where = f"{path}.content.{i}"
        if isinstance(block, TextBlock) or (isinstance(block, ImageBlock) and message.role == "user"):
            said.append((block, where))
        elif isinstance(block, ToolResult) and message.role == "user":
            flush()
            result = _result(block, where)
            out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        else:
            raise _misplaced(block, message.role, where)
    flush()
    return out or [{"role": message.role, "content": ""}]


def _assistant(message: InputMessage, path: str) -> list[dict[str, Any]]:
    texts: list[TextBlock] = []
    calls, thoughts = [], []
    for i, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinking():  # of another server: nothing that this model could read
                pass
            case ToolUse():
                if deeper_than(block.input, MAX_NESTING):
                    where = f"{path}.content.{i}.input"
                    raise BadRequest(f"{where} is nested more than {MAX_NESTING} levels deep.", param=where)
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, message.role, f"{path}.content.{i}")
    out: dict[str, Any] = {"role": "assistant", "content": _text(texts)}
    if thoughts:
        out["reasoning_content"] = out["reasoning"] = "\n".join(thoughts)
    if calls:
        out["tool_calls"] = calls
    return [out]


def _misplaced(block: msgspec.Struct, role: str, path: str) -> BadRequest:
    kind = type(block).__struct_config__.tag
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
    """A budget is a maximum, to which a model that does not think keeps as well."""
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
