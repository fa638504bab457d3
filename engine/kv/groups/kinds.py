"""The kinds of cache groups (`worker.messages.CacheGroup.kind`) and the class that manages the blocks of each."""

from __future__ import annotations

from quire.engine.kv.groups.base import GroupBlocks
from quire.engine.kv.groups.cross import CrossBlocks
from quire.engine.kv.groups.full import FullBlocks
from quire.engine.kv.groups.state import StateBlocks
from quire.engine.kv.groups.window import WindowBlocks

KINDS: dict[str, type[GroupBlocks]] = {
    "full": FullBlocks,
    "window": WindowBlocks,
    "chunk": WindowBlocks,
    "state": StateBlocks,
    "cross": CrossBlocks,
}
