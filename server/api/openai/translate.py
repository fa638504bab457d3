"""OpenAI's requests -> `GenerationSpec`. Raises BadRequest for what makes sense in no model."""

from __future__ import annotations

from typing import Any

from quire.server.api.openai.protocol import (
    ROLES,
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    GenerationFields,
    Message,
    TokenizeRequest,
)
from quire.server.api.openai.structure import structure_of
from quire.server.errors import BadRequest
from quire.server.generate.request import Conversation, GenerationOptions, GenerationSpec

COMPLETION_MAX_TOKENS = 16
# the fields that mean the same in a dialect-neutral request
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
)


def chat_spec(body: ChatCompletionRequest, **identity: Any) -> GenerationSpec:
    """`identity`: request_id, priority, tenant, background."""
    max_tokens_param, max_tokens = _chat_max_tokens(body)
    return GenerationSpec(
        prompts=conversation(body),
        options=_options(body, max_tokens, _chat_logprobs(body)),
        structure=structure_of(body),
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
        prompt_param="messages",
        max_tokens_param=max_tokens_param,
        logprobs_param="top_logprobs",
        **identity,
    )


def completion_spec(body: CompletionRequest, **identity: Any) -> GenerationSpec:
    """`identity`: request_id, priority, tenant, background."""
    if body.best_of not in (None, body.n or 1):
        raise BadRequest(f"best_of must equal n ({body.n or 1}): candidates are not ranked here.", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise BadRequest("max_tokens must be at least 1 unless echo is true.", param="max_tokens")
    return GenerationSpec(
        prompts=_prompts(body.prompt),
        options=_options(body, body.max_tokens, body.logprobs),
        structure=structure_of(body),
        default_max_tokens=COMPLETION_MAX_TOKENS,
        add_special_tokens=body.add_special_tokens,
        echo=bool(body.echo),
        cache_salt=body.cache_salt,
        **identity,
    )


def _options(body: GenerationFields, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    if body.prompt_logprobs is not None and body.stream:
        raise BadRequest("prompt_logprobs are not available with stream.", param="prompt_logprobs")
    try:
        logit_bias = body.logit_bias and {int(key): value for key, value in body.logit_bias.items()}
    except ValueError:
        raise BadRequest("logit_bias: keys must be token ids.", param="logit_bias") from None
    same = {name: getattr(body, name) for name in _SAME}
    return GenerationOptions(
        n=body.n or 1, max_tokens=max_tokens, logprobs=logprobs, logit_bias=logit_bias or None, **same
    )


def _chat_max_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    """The field that sets the limit, and its value."""
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old not in (None, new):
        raise BadRequest(
            "max_tokens is the old name of max_completion_tokens: give one, or both with the same value.",
            param="max_tokens",
        )
    param, value = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
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


def conversation(body: ChatCompletionRequest | TokenizeRequest) -> Conversation:
    """The messages and how to render them. Raises BadRequest naming the message at fault."""
    return Conversation(
        [template_message(message, f"messages.{i}") for i, message in enumerate(body.messages)],
        body.add_generation_prompt,
        bool(body.continue_final_message),
        body.chat_template,
        body.chat_template_kwargs or {},
        body.documents,
    )


def template_message(message: Message, path: str) -> dict[str, Any]:
    """A message in the form that templates expect; only text. Raises BadRequest."""
    if message.role not in ROLES:
        raise BadRequest(
            f"{path}.role must be one of {', '.join(ROLES)}, not '{message.role[:100]}'.", param=f"{path}.role"
        )
    content: str | list[dict[str, str]] | None
    if isinstance(message.content, list):
        content = [
            {"type": "text", "text": _part_text(part, f"{path}.content.{i}")} for i, part in enumerate(message.content)
        ]
    else:
        content = message.refusal if message.content is None else message.content
    if content is None:
        raise BadRequest(
            f"Missing required parameter: {path}.content.", param=f"{path}.content", code="missing_required_parameter"
        )
    out = {"role": message.role, "content": content}
    return out if message.name is None else out | {"name": message.name}


def _part_text(part: ContentPart, path: str) -> str:
    if part.type not in ("text", "refusal"):
        raise BadRequest(
            f"{path}.type: content of type '{part.type[:100]}' is not supported, only text.",
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
