"""Which blocks came into the pool and which left it, as vLLM's KV cache events, from which routers learn where a prefix
is cached. `publisher.py` sends them.

A block's hash on the wire is a number, the last 8 bytes of its hash. `BlockStored` has the tokens of its blocks and the
hash of the block before them, so that a router can compute hashes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.engine.request import Request
from quire.worker.messages import CacheGroup

MEDIUM = "GPU"  # vLLM's name of the pool, on every device
_KINDS = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}


class _Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(_Event):
    """Consecutive blocks of one group that requests can now find. vLLM's fields, in its order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[Any] | None]  # per block: inputs of its values besides tokens
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(_Event):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def wire_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class KVEventLog:
    """The events since the last `take`, in order. Keys are a group's tag, one byte, and a block's hash."""

    def __init__(self, block_size: int, groups: Sequence[CacheGroup]):
        self.block_size, self.groups = block_size, tuple(groups)
        self._events: list[KVEvent] = [AllBlocksCleared()]  # of an earlier run of this engine nothing is left

    def take(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def stored(self, g: int, request: Request, i: int) -> None:
        """Block `i` of a request was published in group `g`."""
        size, hashes = self.block_size, request.block_hashes
        this, parent = wire_hash(hashes[i]), wire_hash(hashes[i - 1]) if i else None
        tokens, extra = request.token_ids[i * size : (i + 1) * size], _extra_keys(request, i, size)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.group_idx == g and last.block_hashes[-1] == parent:
            last.block_hashes.append(this)
            last.token_ids += tokens
            last.extra_keys.append(extra)
            return
        group, name = self.groups[g], ",".join(use.name for use in request.adapters) or None
        window = group.window if group.kind in ("window", "chunk") else None
        kind = _KINDS[group.kind]
        event = BlockStored([this], parent, tokens, size, None, MEDIUM, name, [extra], g, kind, window)
        self._events.append(event)

    def removed(self, key: bytes) -> None:
        """Requests do not find this block any more."""
        g, this = key[0], wire_hash(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == g:
            last.block_hashes.append(this)
        else:
            self._events.append(BlockRemoved([this], MEDIUM, g))

    def cleared(self) -> None:
        """No block is cached; events that were not taken yet do not matter any more."""
        self._events = [AllBlocksCleared()]


def _extra_keys(request: Request, i: int, size: int) -> list[Any] | None:
    """Inputs of block `i` besides tokens, in vLLM's order: images, adapters, and in the first one the salt."""
    keys: list[Any] = [item.key for item in request.images(i * size, (i + 1) * size)] if request.media else []
    keys += [use.name for use in request.adapters]
    if not i and request.cache_salt is not None:
        keys.append(request.cache_salt)
    return keys or None
