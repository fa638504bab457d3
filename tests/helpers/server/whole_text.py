"""The text of tokens without a character at the end whose bytes are not all there, by full decodes."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.text.incremental_decoding import ByteDecoding
from quire.server.text.tokenizer import Tokenizer


def num_unfinished(data: bytes) -> int:
    """The number of bytes at the end that begin a character and lack its others, as Python's strict decoder says."""
    for size in (1, 2, 3):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if (error.reason, error.start) == ("unexpected end of data", 0):
                return min(size, len(data))
    return 0


def whole_text(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
    """The full decode, without an unfinished character at its end."""
    visible = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    left = num_unfinished(b"".join(map(tokenizer.token_bytes, visible)))
    if left and isinstance(tokenizer._decoding, ByteDecoding):
        return tokenizer.decode(ids, skip)[:-1]  # which has one U+FFFD for its bytes
    while left:  # tokens of one byte
        left -= len(tokenizer.token_bytes(visible.pop()))
    return tokenizer.decode(visible, skip)
