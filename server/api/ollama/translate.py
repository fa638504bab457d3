"""Ollama's requests -> `GenerationSpec`. Raises BadRequest for requests that no model can serve."""

from __future__ import annotations

from typing import Any

from quire.server.api.ollama.protocol import ChatMessage, ChatRequest, GenerateRequest, Options
from quire.server.errors import BadRequest
from quire.server.http.parse_body import MAX_NESTING, deeper_than
from quire.server.media.inputs import MediaInput
from quire.server.request.limits import INT64_MAX
from quire.server.request.request import Conversation, GenerationOptions, GenerationSpec, options_of
from quire.server.request.samplers import LAST_TOKENS
from quire.server.request.tools import Reasoning, Tool, ToolChoice
from quire.server.structured.structure import Structure
from quire.server.values import Json

# Ollama's defaults. Its repeat_penalty of 1.1 counts the last 64 tokens; applied to a long prompt, it would change code
# and tables, so it stays 1 unless the request sets it.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_last_n": LAST_TOKENS}


def chat_spec(body: ChatRequest, **identity: Json) -> GenerationSpec:
    """Return the spec. `identity`: request_id, priority, tenant, background."""
    tools = [Tool(tool.function.name, tool.function.description, tool.function.parameters) for tool in body.tools or ()]
    if len({tool.name for tool in tools}) < len(tools):
        raise BadRequest("tools: two tools have the same name.", param="tools")
    messages = [_message(message, f"messages.{i}") for i, message in enumerate(body.messages)]
    prompt = Conversation(
        messages,
        continue_final_message=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
        tools=tools,
        tool_choice=ToolChoice("auto" if tools else "none"),
        reasoning=_reasoning(body),
    )
    return _spec(body, prompt, "messages", identity)


def generate_spec(body: GenerateRequest, **identity: Json) -> GenerationSpec:
    """Return the spec. `identity`: request_id, priority, tenant, background."""
    if body.raw:
        if body.system:
            raise BadRequest("system needs the template, which raw leaves out.", param="system")
        raw = _spec(body, [body.prompt or ""], "prompt", identity)
        raw.media = _images(body.images, "images")
        return raw
    system = [{"role": "system", "content": body.system}] if body.system else []
    question = {"role": "user", "content": _content(body.prompt, body.images, "images")}
    return _spec(body, Conversation([*system, question], reasoning=_reasoning(body)), "prompt", identity)


def _spec(
    body: ChatRequest | GenerateRequest, prompts: Conversation | list[str], param: str, identity: dict[str, Any]
) -> GenerationSpec:
    options = _options(body.options or Options())
    options.speculation = body.speculation
    if body.logprobs:
        options.logprobs = body.top_logprobs or 0
    return GenerationSpec(
        prompts=prompts,
        options=options,
        structure=_structure(body),
        prompt_param=param,
        max_tokens_param="options.num_predict",
        clip_max_tokens=True,
        dialect_defaults=DEFAULTS,
        logprobs_param="top_logprobs",
        **identity,
    )


def _options(options: Options) -> GenerationOptions:
    limit = options.num_predict
    # cut to the context length
    return options_of(options, max_tokens=INT64_MAX if limit is not None and limit <= 0 else limit)


def _structure(body: ChatRequest | GenerateRequest) -> Structure | None:
    if not body.format:
        return None
    if body.format == "json":
        return Structure(kind="json_object", param="format")
    return Structure(kind="json_schema", value=body.format, param="format")


def _reasoning(body: ChatRequest | GenerateRequest) -> Reasoning:
    if body.think is None or isinstance(body.think, bool):
        return Reasoning(enabled=body.think, enabled_param="think")
    return Reasoning(effort=body.think)


def _content(text: str | None, images: list[str] | None, path: str) -> str | list[dict[str, Any]]:
    """Return the text, or the parts of a content with images. `path` is the field that holds them."""
    if not images:
        return text or ""
    parts = [{"type": "image", "image": image} for image in _images(images, path)]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _images(images: list[str] | None, path: str) -> list[MediaInput]:
    return [MediaInput(param=f"{path}.{i}", base64=image) for i, image in enumerate(images or ())]


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    """Return a message in the form that templates expect."""
    content = _content(message.content, message.images, f"{path}.images")
    out: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking:
        out["reasoning_content"] = out["reasoning"] = message.thinking
    if message.tool_calls:
        if message.role != "assistant":
            raise BadRequest(f"{path}.tool_calls: only the assistant calls tools.", param=f"{path}.tool_calls")
        out["tool_calls"] = []
        for i, call in enumerate(message.tool_calls):
            if deeper_than(call.function.arguments, MAX_NESTING):
                where = f"{path}.tool_calls.{i}.function.arguments"
                raise BadRequest(f"{where} is nested more than {MAX_NESTING} levels deep.", param=where)
            function = {"name": call.function.name, "arguments": call.function.arguments}
            out["tool_calls"].append({"id": call.id or f"call_{i}", "type": "function", "function": function})
    if message.role == "tool":
        out["tool_call_id"] = message.tool_call_id or "call_0"
        if name := message.tool_name or message.name:
            out["name"] = name
    elif message.name:
        out["name"] = message.name
    return out
