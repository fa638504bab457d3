"""The engine's cache of compiled grammars: its bounds, and what they do to the process's memory."""

from __future__ import annotations

import os
import random

import pytest
from llguidance import LLMatcher, LLParserLimits

from quire.worker.messages import GRAMMAR_LIMITS
from quire.worker.sampling import grammar_cache
from quire.worker.sampling.grammar_cache import GrammarCache
from tests.server.structured.walk import EOS, SIZE, TOKENIZER


def compile(text: str) -> LLMatcher:
    return LLMatcher(TOKENIZER, text, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))


def choice(i: int, count: int = 100) -> str:
    options = " | ".join(f'"value {i} {j}"' for j in range(count))
    return f'%llguidance {{"no_forcing": true}}\nstart: T\nT: {options}\n'


def pattern(i: int) -> str:
    return f'%llguidance {{"no_forcing": true}}\nstart: T\nT: /[a-z]{{{i % 7},{20 + i % 40}}}x.*y{i}/\n'


def use(matcher: LLMatcher, steps: int, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(steps):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        choices = [token for token in range(SIZE) if bits >> token & 1 and token != EOS]
        if not choices or not matcher.consume_token(choose.choice(choices)):
            return


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_grammar_is_compiled_once():
    compiled = []
    cache = GrammarCache(lambda text: compiled.append(text) or compile(text))
    first, second = cache.matcher(choice(1)), cache.matcher(choice(1))
    assert len(compiled) == 1
    assert first.try_consume_tokens(list(b"value 1 7")) == 9
    assert second.try_consume_tokens(list(b"value 1 8")) == 9  # each at the beginning


def test_the_least_recently_used_go_first(monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 3)
    compiled = []
    cache = GrammarCache(lambda text: compiled.append(text) or compile(text))
    for i in (0, 1, 2, 0, 3, 0, 1):
        cache.matcher(choice(i))
    assert compiled == [choice(i) for i in (0, 1, 2, 3, 1)]
    assert len(cache) == 3


def test_large_grammars_count_by_their_size(monkeypatch):
    monkeypatch.setattr(grammar_cache, "MAX_BYTES", 2 << 20)
    cache = GrammarCache(compile)
    for i in range(12):
        cache.matcher(choice(i, 1000))
        assert cache.num_bytes <= 2 << 20
    assert 0 < len(cache) < 12
    assert cache.matcher(choice(99, 5000)).try_consume_tokens(list(b"value 99 1")) == 10  # too large to keep


def test_growth_while_masks_are_filled_is_bounded_by_the_heap(monkeypatch):
    cache = GrammarCache(compile)
    if not cache._heap_used():
        pytest.skip("only glibc tells the size of its heap")
    for i in range(20):
        use(cache.matcher(pattern(i)), 60, i)
    assert len(cache) == 20
    monkeypatch.setattr(grammar_cache, "MAX_HEAP", 100_000)
    cache.matcher(pattern(20))
    assert len(cache) < 20


@pytest.mark.slow
def test_memory_is_flat_over_many_grammars():
    cache = GrammarCache(compile)

    def run(begin: int, end: int) -> None:
        for i in range(begin, end):
            use(cache.matcher(choice(i) if i % 2 else pattern(i)), 10, i)

    run(0, 200)
    before = resident()
    run(200, 800)
    assert resident() - before < 4 << 20  # without bounds, some 30 MB
