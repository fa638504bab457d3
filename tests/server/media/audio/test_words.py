"""Times and words are those of transformers' code for Whisper."""

from __future__ import annotations

import numpy as np
import pytest

from quire.server.media.audio.words import begins, split_words

TEXTS = [
    " The quick (brown) fox, it said: \"Jump!\" and 'so' on.",
    "Hello",
    " 今日は、天気がいい。",
    " ¿Qué? ¡Ay! naïve – café… 100% [noise] {x}",
    ' "a" b" c',
    " 😀 smile 🤖.",
    "",
    " ...",
    " a - b , c",
]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 40), (5, 5), (7, 120), (40, 9), (60, 300), (2, 1)])
def test_begins(rows, columns):
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    for seed in range(4):
        matrix = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
        if seed == 3:
            matrix = matrix.round()  # many equal sums
        texts, times = _dynamic_time_warping(-matrix.astype(np.float64))
        jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
        assert begins(matrix).tolist() == times[jumps].tolist()


class Bytes:
    """A tokenizer whose tokens are bytes, or with `size` runs of them, as transformers' functions use it."""

    eos_token_id = 1 << 30

    def __init__(self, text: str, size: int):
        raw = text.encode()
        self.parts = [raw[i : i + size] for i in range(0, len(raw), size)]

    def decode(self, ids, decode_with_timestamps=False):
        return b"".join(self.parts[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_split_words(text, spaced, size):
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    tokenizer = Bytes(text, size)
    ids = list(range(len(tokenizer.parts)))
    words, _, indices = _combine_tokens_into_words(tokenizer, ids, "english" if spaced else "japanese")
    found = split_words(ids, tokenizer.decode, spaced)
    assert [one.text for one in found] == words
    assert [list(range(one.first, one.last)) for one in found] == indices
    assert "".join(one.text for one in found) == tokenizer.decode(ids)
