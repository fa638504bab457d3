"""Images in a prompt: where they stand in its text and among its token ids.

The template writes a placeholder for each image. A placeholder that a client writes into a message is text: it is
replaced while the template renders, and put back afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quire.engine.messages import MediaItem
from quire.server.errors import BadRequest
from quire.server.request.request import Conversation, GenerationSpec
from quire.server.text.chat_template import ChatTemplate
from quire.server.turns.threads import Deferred
from quire.server.values import Json

if TYPE_CHECKING:
    from quire.server.media.inputs import ImageInput, Lease, PreparedImage
    from quire.server.request import needs

R = TypeVar("R")


# ---- loading, before a prompt is prepared


def after_images(
    prompt: Conversation | GenerationSpec, state: needs.Images, tenant: str | None, then: Callable[[], R]
) -> R | Deferred[R]:
    """`then()`, once the images of `prompt` are loaded: at once if it has none. Raises BadRequest."""
    load = loading(prompt, state, tenant)
    return then() if load is None else Deferred(load, then)


def loading(
    prompt: Conversation | GenerationSpec, state: needs.Images, tenant: str | None
) -> Callable[[str], Awaitable[None]] | None:
    """Return a function that loads the images of `prompt`, in turns of the tenant that it is given; None if it has
    none. Raises BadRequest for options that the model has not.
    """
    param, max_tokens = "messages", None
    if isinstance(prompt, GenerationSpec):
        max_tokens = state.model.max_model_len
        param = prompt.prompt_param
        prompt = prompt.prompts if isinstance(prompt.prompts, Conversation) else prompt
    if state.images.why_not is not None and isinstance(prompt, Conversation):
        prompt.messages = [_unseen(message) for message in prompt.messages]
    if (options := prompt.processor_options) is not None:
        state.images.check_options(options)
    if not prompt.images:
        return None
    return partial(state.images.load, prompt.images, options, tenant, param, max_tokens)


# ---- messages

_UNSEEN = {"type": "text", "text": "[image: this model reads no images]"}


def _unseen(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as a model that reads no images gets it: in the result of a tool, text stands for each image.

    An agent cannot take back what a tool gave, and each of its further requests would be refused. Images that a user
    attaches are refused when they are loaded.
    """
    content = message.get("content")
    if message["role"] != "tool" or not isinstance(content, list):
        return message
    texts = [(_UNSEEN if part["type"] == "image" else part)["text"] for part in content]
    return message | {"content": "\n".join(texts)}


def after_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the images in results of tools moved to a message of the user after them: templates
    print text only in results.
    """
    out: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            content = message["content"]
            if isinstance(content, list):
                moved += [part for part in content if part["type"] == "image"]
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
    """Hides placeholders in client text while a template renders it, and finds those of the template."""

    def __init__(self, placeholder: str, template: ChatTemplate):
        self._placeholder = placeholder
        self._part = template.image_part(placeholder)
        self._hidden = f"placeholder{secrets.token_hex(16)}"

    def hide(self, value: Json) -> Any:
        """JSON data without placeholders, and with image parts in the form that the template takes."""
        if isinstance(value, str):
            return value.replace(self._placeholder, self._hidden)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "image" in value and value.get("type") == "image":
            return self._part
        return {self.hide(name): self.hide(item) for name, item in value.items()}

    def split(self, text: str) -> list[str]:
        """Return the parts of a rendered text between its images."""
        return [part.replace(self._hidden, self._placeholder) for part in text.split(self._placeholder)]


# ---- text and ids


@dataclass(slots=True)
class Illustrated:
    """A prompt with images: `text` holds what stands for each of them, with every run of image tokens as one."""

    text: str
    leases: list[Lease]
    owners: list[tuple[int, int] | None]  # for each image token in `text`: its image, and how often it is repeated
    token: str
    token_id: int

    @classmethod
    def join(cls, parts: Sequence[str], inputs: Sequence[ImageInput], state: needs.Media, param: str) -> Illustrated:
        """`parts` with the images between them. Raises BadRequest if there are not as many images as gaps."""
        if len(inputs) != len(parts) - 1:
            raise BadRequest(
                f"{param}: the prompt has {len(parts) - 1} placeholders for {len(inputs)} images.", param=param
            )
        token = state.images.image_token
        leases = [one.lease for one in inputs]
        texts, owners = [parts[0]], [None] * parts[0].count(token)
        for i, (lease, part) in enumerate(zip(leases, parts[1:], strict=True)):
            image = lease.image
            texts += [image.text, part]
            owners += [(i, count) for count in image.counts]
            owners += [None] * part.count(token)
        return cls("".join(texts), leases, owners, token, state.images.image_token_id)

    @property
    def images(self) -> list[PreparedImage]:
        return [lease.image for lease in self.leases]

    @property
    def num_tokens(self) -> int:
        """Tokens of all images."""
        return sum(image.num_tokens for image in self.images)

    def expand(self, ids: list[int], param: str) -> tuple[list[int], list[MediaItem]]:
        """`ids` of `text` with the image tokens repeated, and where each image is."""
        if ids.count(self.token_id) != len(self.owners):
            raise BadRequest(f"{param}: '{self.token}' in a text next to an image cannot be told from it.", param=param)
        out: list[int] = []
        spans: dict[int, tuple[int, int]] = {}
        end = 0
        for owner in self.owners:
            start, end = end, ids.index(self.token_id, end)
            out += ids[start:end]
            number, count = owner or (None, 1)
            if number is not None:
                first = spans.get(number, (len(out), 0))[0]
                spans[number] = first, len(out) + count
            out += [self.token_id] * count
            end += 1
        out += ids[end:]
        items = [
            MediaItem(image.key, first, last - first, image.num_tokens, image.path, image.grid)
            for image, (first, last) in zip(self.images, (spans[i] for i in range(len(self.images))), strict=True)
        ]
        return out, items
