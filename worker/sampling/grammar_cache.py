"""Compiled grammars that are kept for further requests, bounded by number and by the memory that they take.

The memory of a grammar is the growth of the C library's heap while it is compiled. It grows further while masks are
filled, because llguidance keeps the lexer states that it has met, without a measure of their size: the heap as a whole
is the last bound, which other allocations of the process can only make stricter.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_GRAMMARS = 64
MAX_BYTES = 64 << 20  # for the grammars as compiled
MAX_HEAP = 512 << 20  # bytes by which the heap may be above its lowest size


class GrammarCache:
    """Compiled grammars, for use by one thread."""

    def __init__(self, compile: Callable[[str], LLMatcher]) -> None:
        self._compile = compile
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()  # most recently used last; bytes
        self.num_bytes = 0
        self._heap_used, self._trim = _heap()
        self._lowest = self._heap_used()

    def __len__(self) -> int:
        return len(self._compiled)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher at the beginning of the grammar."""
        if grammar not in self._compiled:
            before = self._heap_used()
            compiled = self._compile(grammar)
            # other threads allocate and free meanwhile
            size = max(self._heap_used() - before, 4 * len(grammar) + 4096)
            self._compiled[grammar] = compiled, size
            self.num_bytes += size
        self._compiled.move_to_end(grammar)
        result = self._compiled[grammar][0].deep_copy()
        while len(self._compiled) > MAX_GRAMMARS or self.num_bytes > MAX_BYTES:
            self._drop()
        self._bound_heap()
        return result

    def _bound_heap(self) -> None:
        self._lowest = min(self._lowest, self._heap_used())
        if self._heap_used() - self._lowest <= MAX_HEAP:
            return
        while self._compiled and self._heap_used() - self._lowest > MAX_HEAP // 2:
            self._drop()
        self._trim(0)
        if not self._compiled:  # the rest belongs to running requests, or has nothing to do with grammars
            self._lowest = self._heap_used()

    def _drop(self) -> None:
        _, (_, size) = self._compiled.popitem(last=False)
        self.num_bytes -= size


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(f"unused{i}", ctypes.c_size_t) for i in range(7)] + [
        ("uordblks", ctypes.c_size_t),  # bytes in use
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def _heap() -> tuple[Callable[[], int], Callable[[int], object]]:
    """Return functions for the bytes in use in the C library's heaps, and to give free memory back; without glibc, both
    do nothing.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return (lambda: 0), (lambda keep: None)
    library.mallinfo2.restype = _MallInfo
    return (lambda: library.mallinfo2().uordblks), library.malloc_trim
