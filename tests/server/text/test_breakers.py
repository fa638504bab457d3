"""The tokens of DRY's breakers next to a plain search in every token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.text.breakers import MAX_TAIL, BreakerIndex

LETTERS = st.text("abü\n", max_size=4)


def encode(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


@settings(deadline=None)
@given(
    tokens=st.lists(LETTERS | st.sampled_from(["", "ab", "bab"]), min_size=1, max_size=30),
    text=st.text("abü\n", min_size=1, max_size=5),
)
def test_equals_a_plain_search(tokens, text):
    whole, sequences = BreakerIndex([token.encode() for token in tokens], encode).find(text)
    assert set(whole) == {i for i, token in enumerate(tokens) if text in token}
    found = {(first, rest) for firsts, rest in sequences for first in firsts}
    expected = {
        (i, tuple(encode([text[n:]])[0]))
        for i, token in enumerate(tokens)
        for n in range(1, len(text))
        if token.endswith(text[:n]) and text not in token
    }
    assert found == expected


def test_rests_are_cut():
    ((first, rest),) = BreakerIndex([b"x"], encode).find("x" + "y" * 39)[1]
    assert first == (0,) and len(rest) == MAX_TAIL


def test_bytes_that_are_no_text_are_no_breakers():
    whole, sequences = BreakerIndex([b"\xff", b"a\xff", b"\xc3", "ü".encode()], encode).find("üa")
    assert whole == () and sequences == (((3,), (97,)),)
