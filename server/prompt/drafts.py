"""The prompts of a `GenerationSpec` before tokenization: conversations rendered, images joined to the text, and prompts
for the middle of a text checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.server.errors import BadRequest
from quire.server.prompt.conversation import Rendered, render_conversation, text_of
from quire.server.prompt.images import Illustrated, split_at
from quire.server.prompt.infill import InfillDraft, infill_draft
from quire.server.request import needs
from quire.server.request.limits import MAX_CHOICES, MAX_PROMPTS
from quire.server.request.request import Conversation, GenerationSpec


@dataclass(slots=True)
class Draft:
    """One prompt: its text, or the token ids that the client gave."""

    content: str | list[int]
    given: str | None = None  # the client's text, if the prompt is that text, unchanged
    illustrated: Illustrated | None = None  # for a prompt with images; has its `content`
    before_turn: str = ""  # the text before the user's last message, if the model saves its states there


@dataclass(slots=True)
class Drafts:
    """All prompts of a request, tokenized with or without the tokenizer's special tokens."""

    each: list[Draft]
    add_special_tokens: bool
    rendered: Rendered | None = None  # of a conversation
    infill: InfillDraft | None = None  # the text after all prompts, if their middle is requested


def rendered(spec: GenerationSpec, state: needs.Prompting) -> Drafts:
    """Return the prompts of `spec` as texts or given ids. Raises BadRequest naming the parameter."""
    if isinstance(spec.prompts, Conversation):
        return _conversation(spec, spec.prompts, state)
    check_number(spec)
    if spec.suffix is not None:
        infill = infill_draft(spec, state)
        return Drafts([Draft(text, given=text) for text in spec.prompts], False, infill=infill)
    add_special_tokens = spec.add_special_tokens is not False
    if spec.media:
        (text,) = spec.prompts
        placeholders = {name: kind.placeholder for name, kind in state.images.kinds.items()}
        joined = Illustrated.join(*split_at(text, placeholders), spec.media, state, spec.prompt_param)
        return Drafts([Draft(joined.text, given=text, illustrated=joined)], add_special_tokens)
    whole = spec.options.truncate_prompt_tokens is None
    each = [Draft(one, given=one if whole and isinstance(one, str) else None) for one in spec.prompts]
    return Drafts(each, add_special_tokens)


def check_number(spec: GenerationSpec) -> None:
    """Raise BadRequest for too many prompts or choices."""
    num_prompts = len(spec.prompts)
    if num_prompts > MAX_PROMPTS:
        raise BadRequest(f"prompt: {num_prompts} prompts are more than {MAX_PROMPTS}.", param="prompt")
    if num_prompts * spec.options.n > MAX_CHOICES:
        raise BadRequest(f"prompt: {num_prompts} prompts times n are more than {MAX_CHOICES} choices.", param="prompt")


def _conversation(spec: GenerationSpec, conversation: Conversation, state: needs.Prompting) -> Drafts:
    rendered = render_conversation(conversation, state)
    draft = Draft(rendered.text, illustrated=rendered.illustrated)
    if draft.illustrated is None and state.model.keeps_states:
        draft.before_turn = before_turn(conversation, rendered.text)
    return Drafts([draft], bool(spec.add_special_tokens), rendered=rendered)


def before_turn(conversation: Conversation, text: str) -> str:
    """Return the part of the rendered `text` before the user's last message, where an edited conversation continues;
    "" if the message cannot be found.
    """
    message = next((one for one in reversed(conversation.messages) if one["role"] == "user"), None)
    if message is None or not (content := text_of(message).strip()):
        return ""
    return text[: max(text.rfind(content), 0)]
