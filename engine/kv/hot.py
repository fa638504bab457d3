"""The hot pages of a pool, for the tiers below it."""

from __future__ import annotations

from collections import OrderedDict

from quire.engine.kv.pool import PoolObserver


class HotPages(PoolObserver):
    """Tells which pages to copy to lower tiers: before they are overwritten, and in quiet moments."""

    copies_hot = True

    def __init__(self) -> None:
        self.evicted: list[tuple[int, bytes]] = []  # pages reused since a caller last looked, and their keys
        # pages of which no lower tier was given a copy -> time of their first hit in ns, in that order
        self.unsaved: OrderedDict[int, int] = OrderedDict()

    def became_hot(self, page: int, used: int) -> None:
        self.unsaved[page] = used

    def taken(self, page: int, key: bytes, hot: bool) -> None:
        if hot:
            self.evicted.append((page, key))

    def unpublished(self, page: int, key: bytes) -> None:
        self.unsaved.pop(page, None)

    def unpublished_all(self) -> None:
        self.unsaved.clear()
