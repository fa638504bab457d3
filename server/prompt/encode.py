"""Texts, conversations and drafts of prompts -> token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.messages import MediaItem
from quire.server.errors import BadRequest, ContextLengthExceeded
from quire.server.media.inputs import counted
from quire.server.prompt.conversation import Rendered, render_conversation
from quire.server.prompt.drafts import Draft, Drafts
from quire.server.prompt.images import Illustrated
from quire.server.request import needs
from quire.server.request.generation_request import Attached
from quire.server.request.request import Conversation, GenerationSpec
from quire.server.request.sampling import too_long


@dataclass(slots=True)
class Prompt:
    """One prompt, not yet truncated."""

    ids: list[int]
    text: str | None = None  # if it was given as text and is used unchanged
    media: list[Attached] = field(default_factory=list)
    turn_start: int = 0  # number of tokens before the user's last message, 0: unknown


def encoded(drafts: Drafts, spec: GenerationSpec, state: needs.Encoding) -> list[Prompt]:
    """Tokenize all texts of the drafts in one batch, and expand the placeholders of their images. Raises BadRequest."""
    ids = _encode(drafts, spec, state)
    each, others = ids[: len(drafts.each)], ids[len(drafts.each) :]
    if drafts.infill is not None:
        each = drafts.infill.around(each, others)
    elif not (drafts.rendered or all(each)):
        raise BadRequest("prompt must not be empty.", param="prompt")
    if others and drafts.rendered is not None:
        (before,) = others
        return [Prompt(each[0], turn_start=num_common(before, each[0]))]
    return [_prompt(draft, one, spec, state) for draft, one in zip(drafts.each, each, strict=True)]


def num_common(before: list[int], ids: list[int]) -> int:
    """Return the length of the common prefix, in tokens."""
    return next((i for i, (one, other) in enumerate(zip(before, ids)) if one != other), min(len(before), len(ids)))


def _encode(drafts: Drafts, spec: GenerationSpec, state: needs.Encoding) -> list[list[int]]:
    """Return the ids of the drafts, then those of the texts that place the user's turn or follow the prompts."""
    if not isinstance(drafts.each[0].content, str):
        return [draft.content for draft in drafts.each]
    texts = [draft.content for draft in drafts.each]
    texts += [draft.before_turn for draft in drafts.each if draft.before_turn]
    texts += drafts.infill.texts if drafts.infill is not None else ()
    may_truncate = spec.options.truncate_prompt_tokens is not None
    return encode_texts(texts, state, drafts.add_special_tokens, spec.prompt_param, may_truncate=may_truncate)


def _prompt(draft: Draft, ids: list[int], spec: GenerationSpec, state: needs.Model) -> Prompt:
    """Return the prompt with the ids of its images in their places. Raises BadRequest."""
    if (illustrated := draft.illustrated) is None:
        return Prompt(ids, draft.given)
    model, num_tokens = state.model, illustrated.num_tokens
    total = len(ids) + illustrated.num_added
    if total >= model.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your {spec.prompt_param} "
            f"resulted in {total} tokens, of which {counted(illustrated.media)} take {num_tokens}.",
            total,
            model.max_model_len,
            param=spec.prompt_param,
        )
    ids, items = _expanded(illustrated, ids, spec.prompt_param)
    attached = [Attached(*one) for one in zip(items, illustrated.leases, illustrated.kinds, strict=True)]
    return Prompt(ids, draft.given, attached)


def _expanded(illustrated: Illustrated | None, ids: list[int], param: str) -> tuple[list[int], list[MediaItem]]:
    return (ids, []) if illustrated is None else illustrated.expand(ids, param)


# ---- without a request for an answer


def encode_conversation(conversation: Conversation, state: needs.Prompting, add_special_tokens: bool) -> list[int]:
    """Return token ids of the rendered template, of any number. Raises BadRequest naming the option at fault."""
    return encode_rendered(render_conversation(conversation, state), state, add_special_tokens)[0]


def encode_rendered(
    rendered: Rendered, state: needs.Encoding, add_special_tokens: bool
) -> tuple[list[int], list[MediaItem]]:
    """Return the token ids of a rendered template, without a length limit, and its images. Raises BadRequest."""
    (ids,) = encode_texts([rendered.text], state, add_special_tokens, "messages", may_truncate=True)
    return _expanded(rendered.illustrated, ids, "messages")


def encode_texts(
    texts: Sequence[str], state: needs.Encoding, add_special_tokens: bool, param: str, *, may_truncate: bool = False
) -> list[list[int]]:
    """Return token ids of each text.

    A text too long for the context under any tokenization is refused before tokenizing, unless it may be truncated.
    """
    longest = state.tokenizer.max_token_chars
    for text in texts:
        if not may_truncate and len(text) > state.model.max_model_len * longest:
            raise too_long(len(text) // longest, state.model, param, at_least=True)
    try:
        return state.tokenizer.encode_batch(texts, add_special_tokens)
    except ValueError as error:
        raise BadRequest(f"{param}: {error}.", param=param) from error
