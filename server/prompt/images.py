"""Images and videos in a prompt: their places in its text and among its token ids.

The template writes a placeholder for each. A placeholder that a client writes into a message is text: it is
replaced while the template renders, and put back afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quire.engine.messages import MediaItem
from quire.server.errors import BadRequest
from quire.server.media.inputs import MEDIA, ORDINAL, MediaInput
from quire.server.request.request import Conversation, GenerationSpec
from quire.server.text.chat_template import ChatTemplate
from quire.server.turns.threads import Deferred
from quire.server.values import Json

if TYPE_CHECKING:
    from quire.server.media.inputs import Lease, MediaKind
    from quire.server.media.kinds import Kind
    from quire.server.request import needs

R = TypeVar("R")


# ---- loading, before a prompt is prepared


def after_images(
    prompt: Conversation | GenerationSpec, state: needs.Images, tenant: str | None, then: Callable[[], R]
) -> R | Deferred[R]:
    """Return `then()`, once the media of `prompt` are loaded: at once if it has none. Raises BadRequest."""
    load = loading(prompt, state, tenant)
    return then() if load is None else Deferred(load, then)


def loading(
    prompt: Conversation | GenerationSpec, state: needs.Images, tenant: str | None
) -> Callable[[str], Awaitable[None]] | None:
    """Return a function that loads the media of `prompt`, in turns of the tenant passed to it; None without media.
    Raises BadRequest for options that the model does not have.
    """
    param, max_tokens = "messages", None
    if isinstance(prompt, GenerationSpec):
        max_tokens = state.model.max_model_len
        param = prompt.prompt_param
        prompt = prompt.prompts if isinstance(prompt.prompts, Conversation) else prompt
    unread = [name for name in MEDIA if state.images.reason(name) is not None]
    if unread and isinstance(prompt, Conversation):
        prompt.messages = [_unseen(message, unread) for message in prompt.messages]
    if (options := prompt.processor_options) is not None:
        state.images.check_options(options)
    if not prompt.media:
        return None
    frames = prompt.frame_options if isinstance(prompt, Conversation) else {}
    return partial(state.images.load, prompt.media, options, tenant, param, max_tokens, frames=frames)


# ---- messages


def _unseen(message: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the message for a model that reads no media of `kinds`: in tool results, text replaces each.

    An agent cannot take back a tool's result, and each of its further requests would be refused. Media that a user
    attaches are refused when they are loaded.
    """
    content = message.get("content")
    if message["role"] != "tool" or not isinstance(content, list):
        return message
    return message | {"content": [_said(part) if part["type"] in kinds else part for part in content]}


def _said(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": f"[{part['type']}: this model reads no {part['type']}s]"}


def after_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with media in tool results moved to a user message after them: templates print only text in
    results.
    """
    out: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            content = message["content"]
            if isinstance(content, list):
                moved += [part for part in content if part["type"] in MEDIA]
                texts = [part["text"] for part in content if part["type"] == "text"]
                message = message | {"content": "\n".join(texts)}
        elif moved:
            if message["role"] == "user":
                message = message | {"content": [*moved, *_parts(message["content"])]}
            else:
                out.append({"role": "user", "content": moved})
            moved = []
        out.append(message)
    return [*out, {"role": "user", "content": moved}] if moved else out


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Placeholders:
    """Hides placeholders in client text while a template renders it, and finds the template's own."""

    def __init__(self, kinds: Mapping[str, Kind], template: ChatTemplate):
        self._texts = {name: kind.placeholder for name, kind in kinds.items()}
        self._parts = {name: template.media_part(name, text) for name, text in self._texts.items()}
        salt = secrets.token_hex(16)
        self._hidden = {text: f"placeholder{i}{salt}" for i, text in enumerate(self._all_texts(kinds))}

    def _all_texts(self, kinds: Mapping[str, Kind]) -> list[str]:
        """Return the placeholders, and the tokens in them: a client's text may have neither. Longest first."""
        texts = {*self._texts.values(), *(kind.token for kind in kinds.values())}
        return sorted(texts, key=len, reverse=True)

    def hide(self, value: Json) -> Any:
        """Return JSON data without placeholders, and with media parts in the form that the template takes."""
        if isinstance(value, str):
            for text, hidden in self._hidden.items():
                value = value.replace(text, hidden)
            return value
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind in self._parts and isinstance(value.get(kind), MediaInput):
            return self._parts[kind]
        return {self.hide(name): self.hide(item) for name, item in value.items()}

    def split(self, text: str) -> tuple[list[str], list[str]]:
        """Return the parts of a rendered text between its media, and the kinds of these."""
        parts, kinds = split_at(text, self._texts)
        return [self._shown(part) for part in parts], kinds

    def _shown(self, text: str) -> str:
        for original, hidden in self._hidden.items():
            text = text.replace(hidden, original)
        return text


def split_at(text: str, placeholders: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the parts of `text` between the placeholders, given by kind, and the kind of each that was found."""
    names = {placeholder: name for name, placeholder in placeholders.items()}
    pieces = re.split("(" + _any_of(names) + ")", text)
    return pieces[::2], [names[found] for found in pieces[1::2]]


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


# ---- text and ids


@dataclass(frozen=True, slots=True)
class _Run:
    """A token in the text: how often it is repeated for which part of the media; None for one of the client's text."""

    part: int | None = None
    count: int = 1


@dataclass(slots=True)
class Illustrated:
    """A prompt with media: `text` has their placeholders, with every run of tokens as one."""

    text: str
    media: list[MediaInput]
    runs: list[_Run]  # of each placeholder token in `text`
    tokens: dict[str, int]  # the placeholder tokens and their ids

    @classmethod
    def join(
        cls, parts: Sequence[str], kinds: Sequence[str], inputs: Sequence[MediaInput], state: needs.Media, param: str
    ) -> Illustrated:
        """Return `parts` with the media between them, of these `kinds`. Raises BadRequest unless there is one input per
        gap.
        """
        media = _in_order(kinds, inputs, param)
        tokens = {kind.token: kind.token_id for kind in state.images.kinds.values()}
        pattern = re.compile(_any_of(tokens))
        texts, runs, first = [parts[0]], [_Run()] * len(pattern.findall(parts[0])), 0
        before: Counter[MediaKind] = Counter()
        for one, part in zip(media, parts[1:], strict=True):
            medium = one.lease.medium
            texts += [medium.text.replace(ORDINAL, str(before[one.kind])), part]
            before[one.kind] += 1
            runs += [_Run(first + i, count) for i, found in enumerate(medium.parts) for count in found.counts]
            runs += [_Run()] * len(pattern.findall(part))
            first += len(medium.parts)
        return cls("".join(texts), media, runs, tokens)

    @property
    def leases(self) -> list[Lease]:
        """Return the lease of each part of the media."""
        return [one.lease for one in self.media for _ in one.lease.medium.parts]

    @property
    def kinds(self) -> list[MediaKind]:
        """Return the kind of each part of the media."""
        return [one.kind for one in self.media for _ in one.lease.medium.parts]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all media."""
        return sum(one.lease.medium.num_tokens for one in self.media)

    @property
    def num_added(self) -> int:
        """Return the number of tokens that `expand` adds."""
        return sum(run.count - 1 for run in self.runs)

    def expand(self, ids: list[int], param: str) -> tuple[list[int], list[MediaItem]]:
        """Return `ids` of `text` with the placeholder tokens repeated, and the place of each part of the media."""
        token_ids = frozenset(self.tokens.values())
        places = [place for place, token_id in enumerate(ids) if token_id in token_ids]
        if len(places) != len(self.runs):
            names = "' or '".join(self.tokens)
            raise BadRequest(f"{param}: '{names}' in a text next to an image cannot be told from it.", param=param)
        out: list[int] = []
        spans: dict[int, tuple[int, int]] = {}
        end = 0
        for place, run in zip(places, self.runs, strict=True):
            out += ids[end:place]
            if run.part is not None:
                first = spans.get(run.part, (len(out), 0))[0]
                spans[run.part] = first, len(out) + run.count
            out += [ids[place]] * run.count
            end = place + 1
        out += ids[end:]
        return out, self._items(spans)

    def _items(self, spans: dict[int, tuple[int, int]]) -> list[MediaItem]:
        parts = [part for one in self.media for part in one.lease.medium.parts]
        return [
            MediaItem(part.key, first, last - first, part.num_tokens, part.path, part.grid, part.time)
            for part, (first, last) in zip(parts, (spans[i] for i in range(len(parts))), strict=True)
        ]


def _in_order(kinds: Sequence[str], inputs: Sequence[MediaInput], param: str) -> list[MediaInput]:
    """Return the inputs as the placeholders of their `kinds` follow each other. Raises BadRequest for another number
    of a kind.
    """
    for name in dict.fromkeys([*kinds, *(one.kind for one in inputs)]):
        count, given = kinds.count(name), sum(one.kind == name for one in inputs)
        if count != given:
            raise BadRequest(f"{param}: the prompt has {count} placeholders for {given} {name}s.", param=param)
    waiting = {name: iter([one for one in inputs if one.kind == name]) for name in set(kinds)}
    return [next(waiting[name]) for name in kinds]
