"""Decodes the text of tokens in full, without an incomplete character at its end."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.text.incremental_decoding import ByteDecoding
from quire.server.text.tokenizer import Tokenizer


def num_unfinished(data: bytes) -> int:
    """Return the number of bytes of an incomplete character at the end, by Python's strict decoder."""
    for size in (1, 2, 3):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if (error.reason, error.start) == ("unexpected end of data", 0):
                return min(size, len(data))
    return 0


def whole_text(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
    """Return the full decode without an incomplete character at its end."""
    visible = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    left = num_unfinished(b"".join(map(tokenizer.token_bytes, visible)))
    if left and isinstance(tokenizer._decoding, ByteDecoding):
        return tokenizer.decode(ids, skip)[:-1]  # which has one U+FFFD for its bytes
    while left:  # tokens of one byte
        left -= len(tokenizer.token_bytes(visible.pop()))
    return tokenizer.decode(visible, skip)
