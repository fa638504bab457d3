"""The pool of KV cache pages: takes, shares, publishes and releases them.

There are two kinds of pages: blocks with the keys and values of some tokens, and pages with a recurrent state. They
differ in size, so each kind has an order of its own in which free ones are reused (`eviction.py`); ids and keys are
common to both (`pages.py`). Observers are told which pages become visible and which are lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import ClassVar

from quire.engine.kv.eviction import SPARSE, EvictionOrder
from quire.engine.kv.pages import Pages
from quire.engine.request import Request


class PoolObserver:
    """An observer of the pages that requests find in a pool. Each method does nothing unless it is overridden."""

    copies_hot: ClassVar[bool] = False  # it copies hot pages before they are overwritten

    def published(self, page: int, key: bytes, request: Request, i: int | None) -> None:
        """Called when requests can find `page`: block `i` of a request, None if that is unknown."""

    def became_hot(self, page: int, used: int) -> None:
        """Called when a request other than its own found `page`. `used`: the time in ns, earlier for the end of a
        prefix.
        """

    def taken(self, page: int, key: bytes, hot: bool) -> None:
        """Called before `page`, which was published under `key`, is overwritten; `unpublished` follows."""

    def unpublished(self, page: int, key: bytes) -> None:
        """Called when requests no longer find `page`, which was published under `key`."""

    def unpublished_all(self) -> None:
        """Called when requests no longer find any page."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1 and the `num_states` pages for states that follow."""

    def __init__(self, num_blocks: int, num_states: int = 0):
        assert num_blocks > 1, "the pool needs at least one block in addition to the null block"
        self.num_usable, self.num_states, self._first_state = num_blocks - 1, num_states, num_blocks
        self.pages = Pages(num_blocks + num_states)
        self.free_blocks = EvictionOrder(range(1, num_blocks), self.num_usable)
        self.free_states = EvictionOrder(range(num_blocks, num_blocks + num_states), 0)
        self._observers: list[PoolObserver] = []
        # observers' overridden methods, of those called for every page
        self._published: list[Callable[[int, bytes, Request, int | None], None]] = []
        self._taken: list[Callable[[int, bytes, bool], None]] = []
        self._unpublished: list[Callable[[int, bytes], None]] = []

    def observe(self, observer: PoolObserver) -> None:
        """Report later changes to an observer."""
        self._observers.append(observer)
        for name in ("published", "taken", "unpublished"):
            if getattr(type(observer), name) is not getattr(PoolObserver, name):
                getattr(self, f"_{name}").append(getattr(observer, name))

    @property
    def num_free(self) -> int:
        """Return the number of free blocks."""
        return self.free_blocks.num_free

    @property
    def num_free_states(self) -> int:
        """Return the number of free pages for states."""
        return self.free_states.num_free

    @property
    def usage(self) -> float:
        """Return the fraction of held pages, of the kind with the larger fraction, 0 to 1."""
        blocks = 1 - self.num_free / self.num_usable
        return max(blocks, 1 - self.num_free_states / self.num_states) if self.num_states else blocks

    def is_state(self, page: int) -> bool:
        """Return whether this is a page for states."""
        return page >= self._first_state

    def _order(self, page: int) -> EvictionOrder:
        return self.free_states if page >= self._first_state else self.free_blocks

    # ---- holding pages

    def take(self, count: int, state: bool = False) -> list[int]:
        """Allocate `count` free blocks, or pages for states, and unpublish them. The caller has checked that they are
        free.
        """
        order, pages, taken = self.free_states if state else self.free_blocks, self.pages, []
        for _ in range(count):
            page = order.pop()
            pages.num_refs[page] = 1
            pages.blank[page] = 0
            if (key := pages.keys[page]) is not None:
                for notify in self._taken:
                    notify(page, key, page in order.hot)
                self._unpublish(page, order)
            taken.append(page)
        return taken

    def allocate_mark(self, sparse: bool) -> int | None:
        """Take a free page for a state, for a `sparse` mark only one worth no more. Returns None if there is none."""
        order = self.free_states
        if not order.num_free or (sparse and order.next_worth > SPARSE):
            return None
        (page,) = self.take(1, state=True)
        if sparse:
            order.sparse.add(page)
        return page

    def set_sparse(self, page: int) -> None:
        """Reuse a page with a state, which is held, before others once it is free, unless a request finds it."""
        self.free_states.sparse.add(page)

    def share(self, pages: list[int]) -> None:
        """Add a reference to published pages, free or not."""
        num_refs = self.pages.num_refs
        for page in pages:
            if num_refs[page] == 0:
                self._order(page).remove(page)
            num_refs[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop a reference to each page.

        The last page is reused first, because a prefix is worth more than its continuation.
        """
        num_refs, keys = self.pages.num_refs, self.pages.keys
        for page in reversed(pages):
            num_refs[page] = left = num_refs[page] - 1
            assert left >= 0, f"block {page} released twice"
            if not left:
                self._order(page).push(page, keys[page] is None)

    def is_held(self, page: int) -> bool:
        return self.pages.num_refs[page] > 0

    def num_free_among(self, pages: list[int]) -> int:
        """Return the number of these pages that are free now and would not be once shared."""
        return self.pages.num_free_among(pages)

    # ---- finding pages

    def find(self, key: bytes) -> int | None:
        return self.pages.by_key.get(key)

    def hash_of(self, page: int) -> bytes | None:
        """Return the key under which a page is published."""
        return self.pages.keys[page]

    def is_published(self, page: int) -> bool:
        return self.pages.keys[page] is not None

    def record_hits(self, pages: list[int], group: int) -> None:
        """Record that a request of this group of choices found these pages, which are in the order of a prefix. They
        are hot if another one published them.
        """
        now, publishers = time.time_ns(), self.pages.publishers
        for i, page in enumerate(pages):
            if self._order(page).found(page, by_others=publishers[page] != group):
                for observer in self._observers:
                    observer.became_hot(page, now - i * 1000)

    def keep(self, page: int, level: int) -> None:
        """Reuse a published block after all of lower levels, up to MAX_LEVEL. Level 0: keep it no longer."""
        self.free_blocks.keep(page, level)

    @property
    def kept(self) -> dict[int, int]:
        """Return the levels of the kept blocks."""
        return self.free_blocks.levels

    # ---- publishing pages

    def publish(self, page: int, key: bytes, request: Request, i: int | None) -> bool:
        """Let requests find block `i` of a request, if that is known, by its key. If another page already has this key,
        the new one stays private, and the result is False.
        """
        pages = self.pages
        if key in pages.by_key:
            return False
        pages.publish(page, key, request.group)
        if not pages.num_refs[page]:  # a checkpoint: reused after those that were used before
            self._order(page).remove(page)
            self._order(page).push(page)
        for notify in self._published:
            notify(page, key, request, i)
        return True

    def _unpublish(self, page: int, order: EvictionOrder) -> None:
        key = self.pages.unpublish(page)
        if key is not None:
            order.unmark(page)
            for notify in self._unpublished:
                notify(page, key)

    def forget(self, pages: list[int]) -> None:
        """Unpublish these pages, so that no later request finds them, and reuse free ones before all others."""
        for page in pages:
            order = self._order(page)
            self._unpublish(page, order)
            if not self.pages.num_refs[page]:
                order.remove(page)
                order.push(page, empty=True)

    def forget_all(self) -> bool:
        """Unpublish all pages. Returns False, and does nothing, while any page is held."""
        if self.usage:
            return False
        self.pages.unpublish_all()
        self.free_blocks.clear()
        self.free_states.clear()
        for observer in self._observers:
            observer.unpublished_all()
        return True

    # ---- memory

    def give_back(self, most: int, spare: int) -> list[int]:
        """Unpublish up to `most` free blocks whose memory is then returned to the system, and return them: the next to
        be reused, after `spare` blocks that keep theirs. Hot blocks stay if an observer copies their contents.
        """
        hot = self.free_blocks.hot if any(observer.copies_hot for observer in self._observers) else ()
        blank = self.pages.blank
        resident = (page for page in self.free_blocks if not blank[page] and page not in hot)
        given = list(islice(resident, spare, spare + most))
        for page in given:
            blank[page] = 1
            self._unpublish(page, self.free_blocks)
        return given

    def give_back_all(self) -> None:
        """Record that the memory of all pages was returned to the system."""
        self.pages.blank = bytearray(b"\1") * len(self.pages.blank)
