"""llama.cpp's way to choose adapters: a list of {id, scale}."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

MAX_SCALES = 4096  # entries of a list


class LoraScale(msgspec.Struct, kw_only=True):
    """An adapter by its id in /lora-adapters; scale 0 is without it."""

    id: Annotated[int, Meta(ge=0, le=2**31)]
    scale: Annotated[float, Meta(ge=-1e3, le=1e3)]

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}


LoraScales = Annotated[list[LoraScale], Meta(max_length=MAX_SCALES)]
