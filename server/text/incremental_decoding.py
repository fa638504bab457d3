"""Decodes token ids to text as they arrive, in constant time per token, with the result of a full `tokenizers` decode.

A tokenizer's decoder is a small pipeline over token strings ("▁the" -> " the", "<0xE4>" -> a byte, ...). Nearly every
model has one of two shapes: bytes (each token is bytes, text is their UTF-8), or pieces (each token is text by itself,
except runs of byte tokens and the very first piece). `decoding_of` reads the pipeline and returns the matching class;
any other pipeline gets `WindowDecoding`, which decodes a few tokens of context again each time, as vLLM and TGI always
do.

The results of a stream's `push` and `finish` add up to exactly the full decode of prompt and output, minus the text of
the prompt, and minus an incomplete character at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence

import tokenizers

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>\Z")
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))
_utf8 = codecs.getincrementaldecoder("utf-8")


def unfinished(data: bytes) -> bytes:
    """Return the bytes at the end of the UTF-8 that begin a character without completing it.

    Python's decoder also waits after two bytes of a surrogate (ED A0 to ED BF), which are invalid whatever follows.
    """
    decoder = _utf8("replace")
    decoder.decode(data)
    pending = decoder.getstate()[0]
    return b"" if pending[:1] == b"\xed" and pending[1:] >= b"\xa0" else pending


def without_unfinished(data: bytes) -> bytes:
    """Return the UTF-8 without the bytes of an incomplete character at its end."""
    return data[: len(data) - len(unfinished(data))]


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for the 256 bytes: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteDecoding:
    """Tokens are byte strings (byte-level BPE)."""

    def __init__(self, token_of: Callable[[int], str | None]):
        self._token_of = token_of
        self._alphabet = byte_alphabet()
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._compute(token_id)
        return data

    def _compute(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:  # padding id of the vocabulary, without text
            return b""
        try:
            return bytes(self._alphabet[c] for c in token)
        except KeyError:  # added token: its own text
            return token.encode()

    def stream(self, prompt_ids: Sequence[int], skip: frozenset[int], raw_repeats: frozenset[int]) -> ByteStream:
        """Return a stream. `raw_repeats` is unused: bytes have no spaces between added tokens."""
        return ByteStream(self, prompt_ids, skip)


class ByteStream:
    """Decodes bytes. `held` is true while the text of a pushed token is incomplete."""

    def __init__(self, decoding: ByteDecoding, prompt_ids: Sequence[int], skip: frozenset[int]):
        self._decoding = decoding
        self._table = decoding._bytes
        self._skip = skip
        self._decoder = _utf8("replace")
        self.held = False
        # the output completes an unfinished character of the prompt
        self._decoder.decode(unfinished(self._last_bytes(prompt_ids)))

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the last 4 or more bytes of the prompt, or all if it is shorter; an unfinished character has at most
        3.
        """
        data = b""
        for token_id in reversed(prompt_ids):
            if len(data) >= 4:
                break
            if token_id not in self._skip:
                data = self._decoding.token_bytes(token_id) + data
        return data

    def push(self, ids: Iterable[int]) -> str:
        table, skip, compute = self._table, self._skip, self._decoding.token_bytes
        data = b"".join([table[i] if i in table else compute(i) for i in ids if i not in skip])
        if not data:
            return ""
        text = self._decoder.decode(data)
        self.held = data[-1] > 127 and bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """End a text: an unfinished character is left out, and the next `push` begins a character."""
        pending = self._decoder.getstate()[0]
        self._decoder.reset()
        self.held = False
        return without_unfinished(pending).decode(errors="replace")


class PieceDecoding:
    """Decodes tokens that are text by themselves. `steps` convert a token string to text, given whether it is the
    first; byte tokens are collected if `byte_fallback`; `strip` is the number of `strip_char` characters dropped at the
    very start.
    """

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        steps: list[Callable[[str, bool], str]],
        byte_fallback: bool = False,
        strip: int = 0,
        strip_char: str = " ",
    ):
        self.token_of = token_of
        self.strip, self.strip_char = strip, strip_char
        self._steps = steps
        self._byte_fallback = byte_fallback
        self._pieces: dict[int, str | bytes | None] = {}

    def piece(self, token_id: int, first: bool = False) -> str | bytes | None:
        """Return the text of a token; bytes for a byte token; None if the id has no token."""
        if first:
            return self._compute(token_id, True)
        if token_id not in self._pieces:
            self._pieces[token_id] = self._compute(token_id, False)
        return self._pieces[token_id]

    def _compute(self, token_id: int, first: bool) -> str | bytes | None:
        token = self.token_of(token_id)
        if token is None:
            return None
        for step in self._steps:
            token = step(token, first)
        if self._byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes([int(match[1], 16)])
        return token

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece or b""

    def stream(self, prompt_ids: Sequence[int], skip: frozenset[int], raw_repeats: frozenset[int]) -> PieceStream:
        """Return a stream. `raw_repeats`: added tokens without a space after another added token."""
        return PieceStream(self, prompt_ids, skip, raw_repeats)


class PieceStream:
    """Holds a run of byte tokens until it ends: `tokenizers` decodes the whole run to U+FFFD if a part is not UTF-8."""

    def __init__(
        self, decoding: PieceDecoding, prompt_ids: Sequence[int], skip: frozenset[int], raw_repeats: frozenset[int]
    ):
        self._decoding = decoding
        self._skip = skip
        self._raw_repeats = raw_repeats
        self._first = True
        self._after_added = False
        self._strip = decoding.strip
        self._run = b""
        self._run_of_prompt = 0  # leading bytes of the run that belong to the prompt
        self._pass_prompt(prompt_ids)

    @property
    def held(self) -> bool:
        return bool(self._run)

    def _pass_prompt(self, prompt_ids: Sequence[int]) -> None:
        for token_id in prompt_ids:
            if not self._first and not self._strip:
                break
            self.push((token_id,))
        visible = [i for i in prompt_ids[-1:] if i not in self._skip]
        self._after_added = bool(visible) and visible[0] in self._raw_repeats
        self._run = self._unfinished_character(prompt_ids)
        self._run_of_prompt = len(self._run)

    def _unfinished_character(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the bytes of the prompt's last character if it is incomplete."""
        run = b""
        for token_id in reversed(prompt_ids):
            piece = b"" if token_id in self._skip else self._decoding.piece(token_id)
            if isinstance(piece, str):
                break
            run = (piece or b"") + run
        try:
            without_unfinished(run).decode()
        except UnicodeDecodeError:
            return b""
        return unfinished(run)

    def push(self, ids: Iterable[int]) -> str:
        texts: list[str] = []
        for token_id in ids:
            if token_id in self._skip:
                continue
            piece = self._decoding.piece(token_id, self._first)
            if piece is None:
                continue
            self._first = False
            if self._raw_repeats:
                added = token_id in self._raw_repeats
                if added and self._after_added:
                    piece = self._decoding.token_of(token_id)
                self._after_added = added
            if isinstance(piece, bytes):
                self._run += piece
                continue
            if self._run:
                texts.append(self._end_run())
            texts.append(piece)
        return self._strip_start("".join(texts))

    def _end_run(self) -> str:
        run, own, self._run, self._run_of_prompt = self._run, len(self._run) - self._run_of_prompt, b"", 0
        if own <= 0:  # the prompt's last character stays unfinished
            return ""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * own

    def _strip_start(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._decoding.strip_char:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text

    def finish(self) -> str:
        self._run = without_unfinished(self._run)
        return self._strip_start(self._end_run())


class WindowDecoding:
    """Decodes with any tokenizer that has `decode(ids, skip)`: a token's text is its addition to the text before it.

    Exact if a token's text depends only on tokens in the window. A window of `longest` tokens that still ends in U+FFFD
    is emitted as it is. With `byte_level`, tokens are spelled in GPT-2's alphabet of bytes.
    """

    context, longest = 5, 16

    def __init__(
        self,
        decode: Callable[[Sequence[int], bool], str],
        token_of: Callable[[int], str | bytes | None],
        byte_level: bool = False,
    ):
        self.decode = decode
        self._token_of = token_of
        self._alphabet = byte_alphabet() if byte_level else {}

    def token_bytes(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or b""
        if isinstance(token, bytes):  # as from tokenizers that wrap tiktoken
            return token
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        if self._alphabet.keys() >= set(token):
            return bytes(self._alphabet[c] for c in token)
        return token.encode()

    def stream(self, prompt_ids: Sequence[int], skip: frozenset[int], raw_repeats: frozenset[int]) -> WindowStream:
        return WindowStream(self, prompt_ids, skip)


class WindowStream:
    def __init__(self, decoding: WindowDecoding, prompt_ids: Sequence[int], skip: frozenset[int]):
        self._decoding = decoding
        self._skip = skip
        self._ids = self._context(prompt_ids)
        self._num_read = len(self._ids)
        self._prefix = self._whole_characters(self._decode())  # the output completes a character of the prompt
        self.held = False

    def _context(self, ids: Sequence[int]) -> list[int]:
        """Return the last tokens, from the beginning of a character on."""
        start = max(0, len(ids) - self._decoding.context)
        for _ in range(3):
            if start and self._decoding.token_bytes(ids[start])[:1] in _CONTINUATIONS:
                start -= 1
        return list(ids[start:])

    def _decode(self) -> str:
        return self._decoding.decode(self._ids, bool(self._skip))

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        self.held = text.endswith(REPLACEMENT) and len(self._ids) - self._num_read < self._decoding.longest
        if self.held:
            return ""
        return self._read(text)

    def _read(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._ids = self._context(self._ids)
        self._num_read = len(self._ids)
        self._prefix = self._decode()
        return new

    def finish(self) -> str:
        self.held = False
        if len(self._ids) == self._num_read:
            return ""
        return self._read(self._whole_characters(self._decode()))

    def _whole_characters(self, text: str) -> str:
        """Return `text`, that of the window, without an unfinished character at its end. The tokens' bytes distinguish
        its U+FFFD from those in the text.
        """
        if not text.endswith(REPLACEMENT):
            return text
        data = b"".join([self._decoding.token_bytes(i) for i in self._ids if i not in self._skip])
        whole = without_unfinished(data).decode(errors="replace")
        return text.rstrip(REPLACEMENT) + whole[len(whole.rstrip(REPLACEMENT)) :]


_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def clean_up_spaces(text: str) -> str:
    """Clean up spaces as transformers' `clean_up_tokenization_spaces`."""
    for old, new in _CLEAN_UP:
        text = text.replace(old, new)
    return text


class CleanUpStream:
    """A stream that applies `clean_up_spaces` to its text.

    It holds back text that may still be part of a replacement: from a space on, unless a letter excludes it.
    """

    # No replacement spans: (1) a character that occurs in no pattern; (2) the place before a space that follows
    # neither ' nor a space nor n ("n ' t" becomes "n't", and with a space before it is itself a pattern).
    _closed = re.compile(r"(?s).*(?:[^ '.?!,ntmsvre]|[^ 'n](?= ))")

    def __init__(self, stream):
        self._stream = stream
        self._tail = ""

    @property
    def held(self) -> bool:
        return self._stream.held or bool(self._tail)

    def push(self, ids: Iterable[int]) -> str:
        text = self._tail + self._stream.push(ids)
        closed = self._closed.match(text)
        start = closed.end() if closed else 0
        space = text.find(" ", start)
        end = len(text) if space < 0 else space
        self._tail = text[end:]
        return clean_up_spaces(text[:end])

    def finish(self) -> str:
        text, self._tail = self._tail + self._stream.finish(), ""
        return clean_up_spaces(text)


def decoding_of(backend: tokenizers.Tokenizer) -> ByteDecoding | PieceDecoding | WindowDecoding:
    """Return the decoding for this tokenizer's pipeline."""
    pipeline = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    if pipeline is None:
        return PieceDecoding(backend.id_to_token, [lambda token, first: token if first else " " + token])
    stages = pipeline["decoders"] if pipeline["type"] == "Sequence" else [pipeline]
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return ByteDecoding(backend.id_to_token)
    steps = []
    while stages and (step := _piece_step(stages[0])):
        steps.append(step)
        stages = stages[1:]
    # These stages may follow the per-token steps in this order: join bytes, join all, strip leading characters.
    byte_fallback = bool(stages) and stages[0]["type"] == "ByteFallback"
    stages = stages[byte_fallback:]
    fuse = bool(stages) and stages[0]["type"] == "Fuse"
    stages = stages[fuse:]
    strip, strip_char = 0, " "
    if fuse and stages and stages[0]["type"] == "Strip" and stages[0]["stop"] == 0:
        strip, strip_char = stages[0]["start"], stages[0]["content"]
        stages = stages[1:]
    if stages:
        return WindowDecoding(
            lambda ids, skip: backend.decode(ids, skip_special_tokens=skip),
            backend.id_to_token,
            any(stage["type"] == "ByteLevel" for stage in stages),
        )
    return PieceDecoding(backend.id_to_token, steps, byte_fallback, strip, strip_char)


def _piece_step(stage: dict) -> Callable[[str, bool], str] | None:
    """Return the function of a stage that processes each token alone, or None for another stage."""
    match stage:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return lambda token, first: token.replace(old, new)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return lambda token, first: token.replace(mark, "" if first and scheme != "never" else " ")
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return lambda token, first: _word_piece(token, first, prefix, cleanup)
    return None


def _word_piece(token: str, first: bool, prefix: str, cleanup: bool) -> str:
    if not first:
        token = token[len(prefix) :] if token.startswith(prefix) else " " + token
    if cleanup:
        for old, new in _CLEAN_UP[:7]:
            token = token.replace(old, new)
        token = token.replace(" do not", " don't")
        for old, new in _CLEAN_UP[7:]:
            token = token.replace(old, new)
    return token
