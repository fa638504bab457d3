"""OpenAI's requests -> `GenerationSpec`. Raises BadRequest for requests that no model can serve."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.api.openai.other_names import (
    is_unlimited,
    max_tokens_param,
    structure_with_format,
    translate_names,
)
from quire.server.api.openai.protocol import (
    ROLES,
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    ImageUrl,
    MediaIO,
    Message,
    ReasoningSwitch,
    TokenizeRequest,
    VideoUrl,
)
from quire.server.api.openai.tools import MessageToolCall, choice_of, template_call, tools_of
from quire.server.errors import BadRequest
from quire.server.generate.transfer import read_transfer
from quire.server.media.inputs import MediaInput
from quire.server.request.ngrams import from_sglang, from_vllm
from quire.server.request.request import Conversation, GenerationOptions, GenerationSpec, options_of
from quire.server.request.sampling import is_greedy
from quire.server.request.tools import Reasoning
from quire.server.values import Json

COMPLETION_MAX_TOKENS = 16
# fields of a message that templates get unchanged
_PASSED = ("name", "tool_call_id", "reasoning", "reasoning_content")


def chat_spec(body: ChatCompletionRequest, **identity: Json) -> GenerationSpec:
    """Return the spec. `identity`: request_id, priority, tenant, background."""
    translate_names(body)
    limit_param, max_tokens = _chat_max_tokens(body)
    return GenerationSpec(
        prompts=conversation(body),
        options=_options(body, max_tokens, _chat_logprobs(body)),
        structure=structure_with_format(body),
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
        prompt_param="messages",
        max_tokens_param=limit_param,
        logprobs_param="n_probs" if body.n_probs else "top_logprobs",
        transfer=read_transfer(body.kv_transfer_params),
        **identity,
    )


def completion_spec(body: CompletionRequest, **identity: Json) -> GenerationSpec:
    """Return the spec. `identity`: request_id, priority, tenant, background."""
    translate_names(body)
    _check_best_of(body)
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens must be at least 1 unless echo is true.", param="max_tokens")
    return GenerationSpec(
        prompts=_prompts(body.prompt),
        options=_options(body, body.max_tokens, body.logprobs),
        structure=structure_with_format(body),
        max_tokens_param=max_tokens_param(body, "max_tokens"),
        logprobs_param="n_probs" if body.n_probs else "logprobs",
        default_max_tokens=None if is_unlimited(body) else COMPLETION_MAX_TOKENS,
        add_special_tokens=body.add_special_tokens,
        suffix=body.suffix or None,
        echo=bool(body.echo),
        cache_salt=body.cache_salt,
        transfer=read_transfer(body.kv_transfer_params),
        **identity,
    )


def _check_best_of(body: CompletionRequest) -> None:
    """Raise BadRequest if candidates would have to be ranked: without sampling all are equal."""
    n, best_of = body.n or 1, body.best_of
    if best_of in (None, n) or (best_of > n and is_greedy(body.temperature)):
        return
    raise BadRequest(
        f"best_of must equal n ({n}), or exceed it at temperature 0: candidates are not ranked here.", param="best_of"
    )


def _options(body: GenerationFields, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    if body.prompt_logprobs is not None and body.stream:
        raise BadRequest("prompt_logprobs are not available with stream.", param="prompt_logprobs")
    try:
        logit_bias = body.logit_bias and {int(key): value for key, value in body.logit_bias.items()}
    except ValueError:
        raise BadRequest("logit_bias: keys must be token ids.", param="logit_bias") from None
    ngram = from_vllm(body.vllm_xargs) or from_sglang(body.custom_logit_processor, body.custom_params)
    return options_of(
        body,
        n=body.n or 1,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=logit_bias or None,
        no_repeat_ngram=ngram,
        prediction=None if body.prediction is None else body.prediction.text,
    )


def _chat_max_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """Return the field that sets the limit, and its value."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old not in (None, new):
        raise BadRequest(
            "max_tokens is the old name of max_completion_tokens: give one, or both with the same value.",
            param="max_tokens",
        )
    param, value = (max_tokens_param(body, "max_tokens"), old) if new is None else ("max_completion_tokens", new)
    if value == 0:
        raise BadRequest(f"{param} must be at least 1.", param=param)
    return param, value


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise BadRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such lists; not a mixture.",
            param="prompt",
        )
    return [prompt] if int in kinds else prompt


# ---- messages


def _frame_options(given: MediaIO | None) -> dict[str, Any]:
    """Return the settings of videos, without -1, vLLM's word for the default."""
    chosen = msgspec.structs.asdict(given.video) if given is not None and given.video is not None else {}
    return {name: value for name, value in chosen.items() if value not in (None, -1)}


def conversation(body: ChatCompletionRequest | TokenizeRequest) -> Conversation:
    """Return the messages and how to render them. Raises BadRequest naming the message at fault."""
    messages = [template_message(message, f"messages.{i}") for i, message in enumerate(body.messages)]
    _check_results(messages)
    out = Conversation(
        messages,
        body.add_generation_prompt,
        bool(body.continue_final_message),
        body.chat_template,
        body.chat_template_kwargs or {},
        body.documents,
        processor_options=body.mm_processor_kwargs,
        frame_options=_frame_options(body.media_io_kwargs),
    )
    if isinstance(body, TokenizeRequest):
        out.tools = tools_of(body.tools, None)
        return out
    out.tools = tools_of(body.tools, body.functions)
    parallel = body.parallel_tool_calls is not False and not body.functions
    out.tool_choice = choice_of(body.tool_choice, body.function_call, out.tools, parallel)
    out.reasoning = reasoning_of(body)
    return out


def _check_results(messages: list[dict[str, Any]]) -> None:
    """Raise BadRequest for the result of a tool that no earlier message called."""
    first_call = next((i for i, message in enumerate(messages) if "tool_calls" in message), len(messages))
    for i, message in enumerate(messages[:first_call]):
        if message["role"] == "tool":
            raise BadRequest(
                f"messages.{i}: the result of a tool must come after a message of the assistant with tool_calls.",
                param=f"messages.{i}.role",
            )


def template_message(message: Message, path: str) -> dict[str, Any]:
    """Return a message in the form that templates expect, text and images. Next to calls, content may be None. Raises
    BadRequest.
    """
    if message.role not in ROLES:
        raise BadRequest(
            f"{path}.role must be one of {', '.join(ROLES)}, not '{message.role[:100]}'.", param=f"{path}.role"
        )
    content: str | list[dict[str, Any]] | None
    if isinstance(message.content, list):
        content = [_part(part, f"{path}.content.{i}") for i, part in message.parts().items()]
        if message.content and not content:
            content = ""
    else:
        content = message.refusal if message.content is None else message.content
    calls = _calls(message, path)
    if content is None and message.audio is not None:
        content = message.audio.transcript or ""
    if content is None and (message.role == "tool" or message.reasoning or message.reasoning_content):
        content = ""
    if calls and message.role != "assistant":
        raise BadRequest(f"{path}.tool_calls: only the assistant calls tools.", param=f"{path}.tool_calls")
    if content is None and not calls:
        raise BadRequest(
            f"Missing required parameter: {path}.content.", param=f"{path}.content", code="missing_required_parameter"
        )
    out: dict[str, Any] = {"role": "tool" if message.role == "function" else message.role, "content": content}
    out |= {name: value for name in _PASSED if (value := getattr(message, name)) is not None}
    if calls:
        out["tool_calls"] = calls
    return out


def _calls(message: Message, path: str) -> list[dict[str, Any]]:
    """Return the calls of a message of the assistant, in `tool_calls` or the older `function_call`."""
    if message.function_call is not None:
        call = MessageToolCall(function=message.function_call)
        return [template_call(call, f"{path}.function_call")]
    return [template_call(call, f"{path}.tool_calls.{i}") for i, call in enumerate(message.tool_calls or ())]


def reasoning_of(body: ChatCompletionRequest) -> Reasoning:
    """Return the thinking settings from the fields of several servers. Raises BadRequest if two differ."""
    switch = body.reasoning or ReasoningSwitch()
    enabled = _one_of("enable_thinking", body.enable_thinking, "reasoning.enabled", switch.enabled)
    think = body.think if isinstance(body.think, bool) else None
    if think is not None and enabled not in (None, think):
        raise BadRequest("think and enable_thinking differ: give one of them.", param="think")
    budget = _one_of("thinking_token_budget", body.thinking_token_budget, "reasoning.max_tokens", switch.max_tokens)
    return Reasoning(
        effort=_one_of("reasoning_effort", body.reasoning_effort, "reasoning.effort", switch.effort),
        budget=None if budget == -1 else budget,
        enabled=enabled if think is None else think,
        enabled_param="enable_thinking" if think is None else "think",
        separate=body.separate_reasoning is not False and body.reasoning_format != "none",
        stream=body.stream_reasoning is not False,
    )


def _one_of(name: str, value: Json, other_name: str, other: Json) -> Any:
    if value is not None and other not in (None, value):
        raise BadRequest(f"{name} and {other_name} differ: give one of them.", param=name)
    return other if value is None else value


def _part(part: ContentPart, path: str) -> dict[str, Any]:
    if part.type == "image_url":
        return {"type": "image", "image": _image(part, path)}
    if part.type == "video_url":
        return {"type": "video", "video": _video(part, path)}
    return {"type": "text", "text": _part_text(part, path)}


def _image(part: ContentPart, path: str) -> MediaInput:
    param = f"{path}.image_url"
    given = ImageUrl(url=part.image_url) if isinstance(part.image_url, str) else part.image_url or ImageUrl()
    _require_one(given.url, part.uuid, param)
    detail = "high" if given.detail == "original" else given.detail
    return MediaInput(param=param, url=given.url, detail=detail, uuid=part.uuid)


def _video(part: ContentPart, path: str) -> MediaInput:
    param, given = f"{path}.video_url", part.video_url
    url = given.url if isinstance(given, VideoUrl) else given
    _require_one(url, part.uuid, param)
    return MediaInput(param=param, kind="video", url=url, uuid=part.uuid)


def _require_one(url: str | None, uuid: str | None, param: str) -> None:
    if url is None and uuid is None:
        raise BadRequest(f"Missing required parameter: {param}.", param=param, code="missing_required_parameter")


def _part_text(part: ContentPart, path: str) -> str:
    if part.type not in ("text", "refusal"):
        raise BadRequest(
            f"{path}.type: content of type '{part.type[:100]}' is not supported, only text, image_url and video_url.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise BadRequest(
            f"Missing required parameter: {path}.{part.type}.",
            param=f"{path}.{part.type}",
            code="missing_required_parameter",
        )
    return text
