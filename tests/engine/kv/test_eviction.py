"""The order in which free pages are reused, against a naive model that sorts them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.engine.kv.eviction import EMPTY, KEPT, MAX_LEVEL, PLAIN, SPARSE, EvictionOrder

FIRST = 3  # ids need not begin at 0


class OrderAgainstModel(RuleBasedStateMachine):
    """The model has, per free page, the key by which it is sorted; per page, what requests and clients said of it."""

    @initialize(count=st.integers(1, 9), turnover=st.sampled_from([0, 2, 5]))
    def start(self, count, turnover):
        self.pages, self.turnover = range(FIRST, FIRST + count), turnover
        self.order = EvictionOrder(self.pages, turnover)
        self.free: dict[int, tuple] = {page: (EMPTY, 0, 0, page) for page in self.pages}
        self.levels: dict[int, int] = {}
        self.hot: set[int] = set()
        self.sparse: set[int] = set()
        self.num_taken = self.num_pushed = 0

    def key(self, page: int, empty: bool = False) -> tuple:
        """(worth, time of the last use, hot pages after others of the same time, order of release)"""
        self.num_pushed += 1
        if empty:  # the last one first
            return EMPTY, 0, 0, -self.num_pushed
        if page in self.levels:
            return KEPT + self.levels[page], 0, 0, self.num_pushed
        if page in self.sparse:
            return SPARSE, 0, 0, self.num_pushed
        lasts = page in self.hot and self.turnover > 0
        return PLAIN, self.num_taken + lasts * self.turnover, lasts, self.num_pushed

    @property
    def held(self) -> list[int]:
        return [page for page in self.pages if page not in self.free]

    @precondition(lambda self: self.free)
    @rule()
    def pop(self):
        expected = min(self.free, key=self.free.__getitem__)
        assert self.order.next_worth in (self.free[expected][0], self.free[expected][0] + self.free[expected][2])
        assert self.order.pop() == expected
        del self.free[expected]
        self.num_taken += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), empty=st.booleans())
    def push(self, data, empty):
        page = data.draw(st.sampled_from(self.held))
        if empty:  # what the pool does first
            self.unmark(page)
        self.order.push(page, empty)
        self.free[page] = self.key(page, empty)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def remove(self, data):
        page = data.draw(st.sampled_from(sorted(self.free)))
        self.order.remove(page)
        del self.free[page]

    @rule(data=st.data(), level=st.integers(0, MAX_LEVEL))
    def keep(self, data, level):
        pages = [page for page in self.pages if self.free.get(page, (PLAIN,))[0] != EMPTY]
        if not pages:
            return
        page = data.draw(st.sampled_from(pages))
        self.order.keep(page, level)
        if not level and page not in self.levels:
            return
        self.levels[page] = level
        if not level:
            del self.levels[page]
        if page in self.free:
            self.free[page] = self.key(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), by_others=st.booleans())
    def find(self, data, by_others):
        page = data.draw(st.sampled_from(self.held))
        assert self.order.found(page, by_others) == (by_others and page not in self.hot)
        self.sparse.discard(page)
        self.hot |= {page} if by_others else set()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def mark_sparse(self, data):
        page = data.draw(st.sampled_from(self.held))
        self.order.sparse.add(page)
        self.sparse.add(page)

    @rule(data=st.data())
    def lose(self, data):
        """Requests do not find a page any more; a free one keeps its place, unless it was worth more than others."""
        page = data.draw(st.sampled_from(self.pages))
        self.unmark(page)

    def unmark(self, page):
        self.order.unmark(page)
        for marked in (self.hot, self.sparse):
            marked.discard(page)
        self.levels.pop(page, None)
        if page in self.free and (self.free[page][0] >= KEPT or self.free[page][2]):
            self.free[page] = self.key(page)

    @rule()
    def clear(self):
        self.order.clear()
        self.free = {page: (EMPTY, 0, 0, page) for page in self.pages}
        for marked in (self.hot, self.sparse, self.levels):
            marked.clear()

    @invariant()
    def the_same_pages_are_free(self):
        if not hasattr(self, "order"):
            return
        assert self.order.num_free == len(self.free) and sorted(self.order) == sorted(self.free)
        worths = [self.free[page][0] for page in self.order]
        assert worths == sorted(worths)
        assert (self.order.hot, self.order.sparse, self.order.levels) == (self.hot, self.sparse, self.levels)


@pytest.mark.slow
def test_the_order_is_that_of_a_naive_model():
    run_state_machine_as_test(
        OrderAgainstModel, settings=settings(max_examples=200, stateful_step_count=40, deadline=None)
    )


def drained(order: EvictionOrder) -> list[int]:
    return [order.pop() for _ in range(order.num_free)]


def test_each_worth_goes_before_the_next():
    order = EvictionOrder(range(10), 100)
    pages = drained(order)
    assert pages == list(range(10))
    order.sparse.add(1)
    order.found(2, by_others=True)
    for page, level in ((3, 3), (4, 1), (5, 2)):
        order.keep(page, level)
    for page in pages[:8]:
        order.push(page)
    order.push(8, empty=True)
    order.push(9, empty=True)
    assert drained(order) == [9, 8, 1, 0, 6, 7, 2, 4, 5, 3]


def test_a_hot_page_lasts_for_one_turnover():
    order = EvictionOrder(range(3), 3)
    hot, *others = drained(order)
    order.found(hot, by_others=True)
    order.push(hot)
    gone = []
    for _ in range(8):
        order.push(others[0])
        gone.append(order.pop())
        others = [*others[1:], gone[-1]]
    assert gone.index(hot) == 4  # used when 3 were taken: 4, 5, 6 and 7 go before it
