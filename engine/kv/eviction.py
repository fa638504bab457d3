"""The order in which free pages are reused: the only rule of retention.

A free page has a worth, which decides first:

    EMPTY     requests find nothing in it
    SPARSE    a state within a prompt, from which few requests continue, and none did so far
    PLAIN     contents of a request
    KEPT + n  contents that a client asked to keep, or whose client runs tools: level n, 1 to MAX_LEVEL (`retention.py`)

Pages of equal worth are reused in the order of their last use. The last use of a hot page, which another request
found, counts as one turnover later: as many taken pages as there are pages. A prefix is released from its end,
so that a block is never reused before those that continue it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

EMPTY, SPARSE, PLAIN, HOT, KEPT = range(5)  # HOT: worth as much as PLAIN, with a queue of its own
MAX_LEVEL = 3
_NOT_FREE = 255


class EvictionOrder:
    """The free pages among `pages`, at first all of them, and the worth of each page.

    An OrderedDict is a hash map over a doubly linked list, in C, so that every operation takes constant time. Hot pages
    last for `turnover` pages longer than others. `turnover` is 0 for states: a conversation's newest state, which no
    request found yet, is worth more than the one before, which was found.
    """

    def __init__(self, pages: range, turnover: int):
        self._pages, self._turnover = pages, turnover
        self._queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(KEPT + MAX_LEVEL + 1)]
        self._place = bytearray(pages.stop)  # index of a free page's queue
        self._used = [0] * pages.stop  # `_num_taken` at the last use of a free page
        self._num_taken = 0
        self.hot: set[int] = set()
        self.sparse: set[int] = set()
        self.levels: dict[int, int] = {}  # per page to keep
        self.clear()

    def clear(self) -> None:
        """Make all pages free and empty, in the order of their ids, so that pages never written stay so longest."""
        for queue in self._queues:
            queue.clear()
        self._queues[EMPTY].update(dict.fromkeys(self._pages))
        for page in self._pages:
            self._place[page] = EMPTY
        self.hot.clear()
        self.sparse.clear()
        self.levels.clear()
        self.num_free = len(self._pages)

    # ---- free pages

    def push(self, page: int, empty: bool = False) -> None:
        """Add a page that is free from now on. An empty one is reused next."""
        place = EMPTY if empty else self._worth(page)
        self._place[page], self._used[page] = place, self._num_taken
        self._queues[place][page] = None
        if empty:
            self._queues[EMPTY].move_to_end(page, last=False)
        self.num_free += 1

    def pop(self) -> int:
        """Remove and return the page to reuse next. There is one."""
        page, _ = self._queues[self._next()].popitem(last=False)
        self._place[page] = _NOT_FREE
        self._num_taken += 1
        self.num_free -= 1
        return page

    def remove(self, page: int) -> None:
        """Remove a free page, which is in use again."""
        del self._queues[self._place[page]][page]
        self._place[page] = _NOT_FREE
        self.num_free -= 1

    @property
    def next_worth(self) -> int:
        """Return the worth of the page to reuse next, which must exist."""
        return self._next()

    def __iter__(self) -> Iterator[int]:
        """Return the free pages, roughly the next to be reused first."""
        return (page for queue in self._queues for page in queue)

    def _next(self) -> int:
        """Return the index of the queue whose first page is reused next."""
        queues, place = self._queues, 0
        while not queues[place]:
            place += 1
        if place == PLAIN and queues[HOT]:
            plain, hot = (self._used[next(iter(queue))] for queue in (queues[PLAIN], queues[HOT]))
            return PLAIN if plain <= hot + self._turnover else HOT
        return place

    def _worth(self, page: int) -> int:
        """Return the index of the queue for a page that is not empty."""
        if level := self.levels.get(page):
            return KEPT + level
        if page in self.sparse:
            return SPARSE
        return HOT if page in self.hot and self._turnover else PLAIN

    # ---- worth of pages, free or not

    def keep(self, page: int, level: int) -> None:
        """Reuse a page that is not empty after all pages of lower levels, a free one also after those of its own level.
        Level 0: keep it no longer.
        """
        if level:
            self.levels[page] = level
        elif self.levels.pop(page, None) is None:
            return
        if self._place[page] != _NOT_FREE:
            self.remove(page)
            self.push(page)

    def found(self, page: int, by_others: bool) -> bool:
        """Record that a request found a page, which it holds. `by_others`: the request is not of the publisher's group.
        Returns whether the page became hot.
        """
        self.sparse.discard(page)
        if not by_others or page in self.hot:
            return False
        self.hot.add(page)
        return True

    def unmark(self, page: int) -> None:
        """Reset the worth of a page that requests no longer find."""
        self.hot.discard(page)
        self.sparse.discard(page)
        self.levels.pop(page, None)
        if PLAIN < self._place[page] < _NOT_FREE:
            self.remove(page)
            self.push(page)
