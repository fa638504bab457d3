"""Turns of the offline `LLM`'s prompts that have images or videos."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.server.errors import Unavailable
from quire.server.http import needs
from quire.server.prompt.images import loading
from quire.server.request.request import Conversation, GenerationSpec

MAX_TURNS = 64  # prompts with images at once


def has_images(spec: GenerationSpec) -> bool:
    """Return whether a prompt's images must be loaded before it is prepared."""
    return bool(spec.prompts.media if isinstance(spec.prompts, Conversation) else spec.media)


class ImageTurns:
    """Lets prompts with images run some at a time: the images of running requests share limited memory."""

    def __init__(self, state: needs.Media):
        self._state = state
        state.images.enlarge()
        self._slots = asyncio.Semaphore(MAX_TURNS)
        self._num_active = 0  # prompts that load their images, or hold them
        self._num_started = 0  # times that a prompt became active
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def turn(self, spec: GenerationSpec) -> AsyncIterator[None]:
        """Load the images of `spec` within the block. Raises BadRequest, Unavailable if they alone are too large."""
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
        for image in spec.prompts.media if isinstance(spec.prompts, Conversation) else spec.media:
            if image.lease is not None:
                image.lease.release()
        self._num_active -= 1
        try:
            if self._num_active:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._begin()
