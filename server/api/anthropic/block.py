"""The base of Anthropic's blocks, which tells their kinds apart by `type`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

MAX_SCHEMA_FIELDS = 4096
Name = Annotated[str, Meta(max_length=256)]
JsonObject = Annotated[dict[str, Any], Meta(max_length=MAX_SCHEMA_FIELDS)]
NOTHING: dict[str, tuple] = {}
# `type` tells the kinds of a block apart, and is no field of the types here
OF_BLOCK = frozenset({"type"})


class CacheControl(msgspec.Struct, kw_only=True):
    """The prompt up to here is wanted again, within `ttl`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    harmless: ClassVar = frozenset({"scope"})
    unsupported: ClassVar = NOTHING


class BaseBlock(msgspec.Struct, kw_only=True, tag_field="type"):
    cache_control: CacheControl | None = None

    harmless: ClassVar = OF_BLOCK
    unsupported: ClassVar = NOTHING
