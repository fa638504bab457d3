"""The prompts of a `GenerationSpec` as token ids, and the settings of the answer that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.server.errors import BadRequest, ContextLengthExceeded
from quire.server.prompt.conversation import Reading, read_answer, render_conversation, text_of
from quire.server.prompt.encode import encode_texts
from quire.server.prompt.images import Illustrated
from quire.server.prompt.infill import infill_prompts
from quire.server.request import needs
from quire.server.request.generation_request import Attached
from quire.server.request.limits import MAX_CHOICES, MAX_PROMPTS
from quire.server.request.request import Conversation, GenerationSpec


@dataclass(slots=True)
class Prompt:
    """One prompt, not yet truncated."""

    ids: list[int]
    text: str | None = None  # if it was given as text and is used whole
    media: list[Attached] = field(default_factory=list)
    turn_start: int = 0  # number of tokens before the user's last message, 0: unknown


@dataclass(slots=True)
class Prompts:
    """All prompts of a request, how their answers are read, and the ids that end an answer besides the request's."""

    each: list[Prompt]
    reading: Reading
    end_ids: tuple[int, ...] = ()


def prompts_of(spec: GenerationSpec, state: needs.Prompting) -> Prompts:
    """Renders, tokenizes, and inserts images. Raises BadRequest naming the parameter."""
    if isinstance(spec.prompts, Conversation):
        return _of_conversation(spec, spec.prompts, state)
    reading = Reading(structure=spec.structure)
    if spec.suffix is not None:
        each, infill = infill_prompts(spec, state)
        return Prompts(_whole(each, spec), reading, tuple(infill.ends))
    if spec.images:
        return Prompts([_of_text_with_images(spec, state)], reading)
    return Prompts(_whole(_ids_of(spec, state), spec), reading)


def _of_conversation(spec: GenerationSpec, conversation: Conversation, state: needs.Prompting) -> Prompts:
    rendered = render_conversation(conversation, state)
    may_truncate = spec.options.truncate_prompt_tokens is not None
    (ids,) = encode_texts([rendered.text], state, bool(spec.add_special_tokens), "messages", may_truncate=may_truncate)
    reading = read_answer(conversation, rendered, spec.structure, state)
    if rendered.illustrated is not None:
        return Prompts([_expand(rendered.illustrated, ids, spec, state)], reading)
    add_special_tokens = bool(spec.add_special_tokens)
    turn_start = tokens_before_turn(conversation, rendered.text, ids, state, add_special_tokens)
    return Prompts([Prompt(ids, turn_start=turn_start)], reading)


def tokens_before_turn(
    conversation: Conversation, text: str, ids: list[int], state: needs.Encoding, add_special_tokens: bool
) -> int:
    """Return the number of tokens of `ids`, the rendered `text`, before the user's last message: where a conversation
    goes on that is edited there. 0 if the message cannot be found, or if nothing depends on it.
    """
    message = next((one for one in reversed(conversation.messages) if one["role"] == "user"), None)
    if not state.model.keeps_states or message is None or not (content := text_of(message).strip()):
        return 0
    (before,) = state.tokenizer.encode_batch([text[: max(text.rfind(content), 0)]], add_special_tokens)
    return next((i for i, (one, other) in enumerate(zip(before, ids)) if one != other), min(len(before), len(ids)))


def _of_text_with_images(spec: GenerationSpec, state: needs.Prompting) -> Prompt:
    (text,) = spec.prompts
    illustrated = Illustrated.join(text.split(state.images.placeholder), spec.images, state, spec.prompt_param)
    (ids,) = encode_texts([illustrated.text], state, spec.add_special_tokens is not False, spec.prompt_param)
    prompt = _expand(illustrated, ids, spec, state)
    prompt.text = text
    return prompt


def _ids_of(spec: GenerationSpec, state: needs.Encoding) -> list[list[int]]:
    """Return token ids of each prompt, not yet truncated. Raises BadRequest for `spec.prompt_param`."""
    prompts, may_truncate = spec.prompts, spec.options.truncate_prompt_tokens is not None
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompt: {len(prompts)} prompts are more than {MAX_PROMPTS}.", param="prompt")
    if len(prompts) * spec.options.n > MAX_CHOICES:
        raise BadRequest(f"prompt: {len(prompts)} prompts times n are more than {MAX_CHOICES} choices.", param="prompt")
    if isinstance(prompts[0], str):
        prompts = encode_texts(
            prompts, state, spec.add_special_tokens is not False, spec.prompt_param, may_truncate=may_truncate
        )
    if not all(prompts):
        raise BadRequest("prompt must not be empty.", param="prompt")
    return prompts


def _whole(each: list[list[int]], spec: GenerationSpec) -> list[Prompt]:
    """Return the prompts with their texts, if they were given as texts and are not truncated."""
    texts = isinstance(spec.prompts[0], str) and spec.options.truncate_prompt_tokens is None
    return [Prompt(ids, text if texts else None) for ids, text in zip(each, spec.prompts, strict=True)]


def _expand(illustrated: Illustrated, ids: list[int], spec: GenerationSpec, state: needs.Model) -> Prompt:
    """Return the prompt with the ids of its images in their places. Raises BadRequest."""
    if spec.options.truncate_prompt_tokens is not None:
        raise BadRequest(
            "truncate_prompt_tokens is not available for a prompt with images.", param="truncate_prompt_tokens"
        )
    model, num_tokens = state.model, illustrated.num_tokens
    total = len(ids) + num_tokens - sum(owner is not None for owner in illustrated.owners)
    if total >= model.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your {spec.prompt_param} "
            f"resulted in {total} tokens, of which {len(illustrated.images)} images take {num_tokens}.",
            total,
            model.max_model_len,
            param=spec.prompt_param,
        )
    ids, items = illustrated.expand(ids, spec.prompt_param)
    return Prompt(ids, media=[Attached(item, one) for item, one in zip(items, illustrated.leases, strict=True)])
