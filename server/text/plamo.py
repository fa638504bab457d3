"""The tokenizer of PLaMo 2 and 3 (tokenizer.jsonl): scored pieces of text, and bytes for characters without a piece.

A text is cut into the pieces whose scores have the largest sum, from its end to its beginning. Among equal sums the one
with longer first pieces is taken, for which `tokenizers.models.Unigram`, which goes the other way, has no setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from quire.server.text.incremental_decoding import ByteDecoding
from quire.server.values import Json

FILE = "tokenizer.jsonl"
_DEFAULTS = {f"{name}_token": f"<|plamo:{name}|>" for name in ("unk", "bos", "eos", "pad")}
_UNKNOWN = 10_000_000  # the cost of a character as bytes; those of pieces are -score times _SCALE, rounded
_SCALE = 10_000


class Encoding(NamedTuple):
    ids: list[int]
    sequence_ids: list[int | None]

    @property
    def type_ids(self) -> list[int]:
        return [0] * len(self.ids)


class PlamoTokenizer:
    """Has the methods of `tokenizers.Tokenizer` that `Tokenizer` calls.

    `entries` are (text, score, kind) by id, as lines of the file begin; kinds are NORMAL, CONTROL, UNKNOWN and BYTE.
    """

    def __init__(self, entries: Iterable[Sequence[Any]], config: Mapping[str, Json]):
        self._texts: list[str] = []
        self._costs: dict[str, int] = {}
        self._bytes: dict[int, int] = {}  # byte -> id
        self._byte_of: dict[int, bytes] = {}  # by id
        special = {text for key, text in config.items() if key.endswith("_token") and isinstance(text, str)}
        special.update(text for text in config.get("additional_special_tokens") or () if isinstance(text, str))
        self._special: dict[int, str] = {}
        for i, (text, score, kind, *_) in enumerate(entries):
            self._texts.append(text)
            if kind == "BYTE":
                byte = int(text[3:5], 16)
                self._bytes[byte], self._byte_of[i] = i, bytes([byte])
                continue
            if text in special or kind in ("CONTROL", "UNKNOWN"):
                self._special[i] = text
            self._costs[text] = -round(score * _SCALE)
        if len(self._bytes) != 256:
            raise ValueError(f"the vocabulary has {len(self._bytes)} of the 256 bytes (<0x00> to <0xFF>)")
        self._ids = {text: i for i, text in enumerate(self._texts)}
        self._beginnings = {text[:n] for text in self._costs for n in range(1, len(text) + 1)}
        self._marks = re.compile("|".join(map(re.escape, sorted(self._special.values(), key=len, reverse=True))))
        named = {name: self._ids.get(config.get(name) or "") for name in ("bos_token", "eos_token")}
        self._before = [named["bos_token"]] if config.get("add_bos_token") and named["bos_token"] is not None else []
        self._after = [named["eos_token"]] if config.get("add_eos_token") and named["eos_token"] is not None else []

    @classmethod
    def load(cls, path: Path, config: Mapping[str, Json]) -> PlamoTokenizer:
        """Load the vocabulary. Raises ValueError for a file that is none."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls([json.loads(line) for line in file if line.strip()], config)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error

    # ---- as `tokenizers.Tokenizer`

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        return [self._joined([text], add_special_tokens) for text in texts]

    def encode_batch(self, pairs: list[tuple[str, str]], add_special_tokens: bool) -> list[Encoding]:
        return [self._joined(pair, add_special_tokens) for pair in pairs]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        hidden = self._special if skip_special_tokens else ()
        parts = [self._text_bytes(i) for i in ids if i not in hidden]
        return b"".join(parts).decode("utf-8", errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        return self._texts[token_id] if token_id < len(self._texts) else None

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        return len(self._texts)

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return self._ids

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return {i: AddedToken(text, special=True, normalized=False) for i, text in self._special.items()}

    def decoding(self) -> ByteDecoding:
        return _Decoding(self._text_bytes)

    # ---- texts

    def _joined(self, texts: Sequence[str], add_special_tokens: bool) -> Encoding:
        ids: list[int] = []
        sequence_ids: list[int | None] = []
        for number, text in enumerate(texts):
            own, before, after = self._encode(text), self._before, self._after
            if not add_special_tokens:
                before = after = []
            ids += before + own + after
            sequence_ids += [None] * len(before) + [number] * len(own) + [None] * len(after)
        return Encoding(ids, sequence_ids)

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TypeError("unpaired surrogates") from error  # as the library raises
        ids, end = [], 0
        for mark in self._marks.finditer(text) if self._special else ():
            ids += self._pieces(text[end : mark.start()])
            ids.append(self._ids[mark[0]])
            end = mark.end()
        return ids + self._pieces(text[end:])

    def _pieces(self, text: str) -> list[int]:
        costs, beginnings = self._costs, self._beginnings
        least, ends = [0] * (len(text) + 1), [0] * len(text)  # from each place: the least cost, the end of its piece
        for start in range(len(text) - 1, -1, -1):
            best, piece_end = least[start + 1] + _UNKNOWN, -1
            for end in range(start + 1, len(text) + 1):
                piece = text[start:end]
                if piece not in beginnings:
                    break
                if (cost := costs.get(piece)) is not None and cost < 2 * _UNKNOWN and cost + least[end] <= best:
                    best, piece_end = cost + least[end], end
            least[start], ends[start] = best, piece_end
        ids, start = [], 0
        while start < len(text):
            if (end := ends[start]) < 0:
                end = start + 1
                ids += [self._bytes[byte] for byte in text[start:end].encode()]
            else:
                ids.append(self._ids[text[start:end]])
            start = end
        return ids

    def _text_bytes(self, token_id: int) -> bytes:
        # a model's vocabulary may be padded
        return self._byte_of.get(token_id) or (self.id_to_token(token_id) or "").encode()


class _Decoding(ByteDecoding):
    def __init__(self, bytes_of: Callable[[int], bytes]):
        super().__init__(lambda token_id: None)
        self._bytes_of = bytes_of

    def _compute(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)


def with_defaults(config: dict[str, Json]) -> dict[str, Json]:
    """Return the settings with the defaults of the published class."""
    return _DEFAULTS | {key: value for key, value in config.items() if value is not None}
