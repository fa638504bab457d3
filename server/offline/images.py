"""Images in the prompts of an offline `LLM`: vLLM's `multi_modal_data`, and parts of messages that hold pictures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from quire.server.errors import Unavailable
from quire.server.http import needs
from quire.server.media.inputs import ImageInput
from quire.server.prompt.images import loading
from quire.server.request.request import Conversation, GenerationSpec
from quire.server.values import Json

PICTURE = "image_pil"  # type of a part that holds a PIL.Image.Image
MAX_TURNS = 64  # prompts with images at once


def images_of_prompt(prompt: Mapping[str, Any]) -> list[ImageInput]:
    """Return the images in a prompt's "multi_modal_data", with their "multi_modal_uuids". Raises ValueError."""
    data = prompt.get("multi_modal_data") or {}
    for name in data:
        if name != "image":
            raise ValueError(f"multi_modal_data.{name} is not supported, only image")
    pictures = _as_list(data.get("image"))
    uuids = _as_list((prompt.get("multi_modal_uuids") or {}).get("image")) or [None] * len(pictures)
    if len(uuids) != len(pictures):
        raise ValueError(f"multi_modal_uuids.image: {len(uuids)} for {len(pictures)} images")
    return [
        picture_input(picture, uuid, f"multi_modal_data.image.{i}")
        for i, (picture, uuid) in enumerate(zip(pictures, uuids, strict=True))
    ]


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def picture_input(picture: object, uuid: str | None, path: str) -> ImageInput:
    """Return a PIL.Image.Image; None stands for one whose uuid is cached. Raises ValueError."""
    from PIL import Image

    if picture is None and uuid is None:
        raise ValueError(f"{path}: None needs a uuid")
    if picture is not None and not isinstance(picture, Image.Image):
        raise ValueError(f"{path} must be a PIL.Image.Image, not {type(picture).__name__}")
    return ImageInput(param=path, picture=picture, uuid=uuid)


def take_pictures(content: Json, path: str) -> tuple[Any, dict[int, ImageInput]]:
    """Return a message's content with an empty text for every picture in it, and the pictures by their place. Raises
    ValueError.
    """
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content, {}
    pictures: dict[int, ImageInput] = {}
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == PICTURE:
            where = f"{path}.{i}"
            if unknown := sorted(set(part) - {"type", PICTURE, "uuid"}):
                raise ValueError(f"{where}.{unknown[0]} is not supported")
            pictures[i] = picture_input(part.get(PICTURE), part.get("uuid"), f"{where}.{PICTURE}")
    empty = {"type": "text", "text": ""}
    return [empty if i in pictures else part for i, part in enumerate(content)], pictures


def has_images(spec: GenerationSpec) -> bool:
    """Return whether a prompt's images must be loaded before it is prepared."""
    return bool(spec.prompts.images if isinstance(spec.prompts, Conversation) else spec.images)


class ImageTurns:
    """Lets prompts with images run some at a time: the images of running requests share limited memory."""

    def __init__(self, state: needs.Media):
        self._state = state
        state.images.may_enlarge = True
        self._slots = asyncio.Semaphore(MAX_TURNS)
        self._num_active = 0  # prompts that load their images, or hold them
        self._num_started = 0  # times that a prompt became active
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, spec: GenerationSpec) -> AsyncIterator[None]:
        """The images of `spec` are loaded within. Raises BadRequest, Unavailable if they alone are too large."""
        load = loading(spec, self._state, None)
        if load is None:
            yield
            return
        async with self._slots:
            self._begin()
            try:
                while True:
                    alone, num_before = self._num_active == 1, self._num_started
                    try:
                        await load("")
                        break
                    except Unavailable:
                        if alone and num_before == self._num_started:
                            raise
                        await self._give_way(spec)
                yield
            finally:
                self._num_active -= 1
                self._changed.set()

    def _begin(self) -> None:
        self._num_active += 1
        self._num_started += 1

    async def _give_way(self, spec: GenerationSpec) -> None:
        """Release what was loaded, and wait until another prompt has ended."""
        for image in spec.prompts.images if isinstance(spec.prompts, Conversation) else spec.images:
            if image.lease is not None:
                image.lease.release()
        self._num_active -= 1
        try:
            if self._num_active:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._begin()
