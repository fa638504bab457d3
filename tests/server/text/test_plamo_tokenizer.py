"""PLaMo's tokenizer (tokenizer.jsonl) against all ways to cut a text into pieces."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.text.plamo import PlamoTokenizer
from quire.server.text.tokenizer import Tokenizer

LETTERS = "ab あ漢\n"
SPECIAL = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>"]


def entries(size: int = 300) -> list[tuple[str, float, str]]:
    """A vocabulary with many equal sums of scores."""
    draw, pieces = random.Random(1), set(LETTERS)
    while len(pieces) < size - len(SPECIAL) - 256:
        pieces.add("".join(draw.choice(LETTERS) for _ in range(draw.randint(2, 5))))
    found = [(text, 0.0, "CONTROL" if i else "UNKNOWN") for i, text in enumerate(SPECIAL)]
    found += [(f"<0x{byte:02X}>", 0.0, "BYTE") for byte in range(256)]
    return found + [(piece, draw.choice([-1.0, -2.0, -2.0, -3.5, -9.0]), "NORMAL") for piece in sorted(pieces)]


def write_folder(folder: Path, size: int = 300, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries(size)]
    (folder / "tokenizer.jsonl").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Plamo2Tokenizer", **config}))
    return folder


def best(text: str) -> list[str]:
    """The pieces of the largest sum of scores, of equal ones those that are longer first; None for bytes."""
    scores = {piece: round(score * 10_000) for piece, score, kind in entries() if kind != "BYTE"}

    @cache
    def rest(start: int) -> tuple[int, tuple[int, ...]]:
        if start == len(text):
            return 0, ()
        ways = []
        for end in range(start + 1, len(text) + 1):
            if text[start:end] in scores:
                score, lengths = rest(end)
                ways.append((score + scores[text[start:end]], (end - start, *lengths)))
        score, lengths = rest(start + 1)
        return max([*ways, (score - 10_000_000, (0, *lengths))])  # 0: a character as bytes

    pieces, start = [], 0
    for length in rest(0)[1]:
        size = length or 1
        pieces += [text[start : start + size]] if length else [f"<0x{b:02X}>" for b in text[start : start + 1].encode()]
        start += size
    return pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("plamo")))


@given(st.text(st.sampled_from(LETTERS + "z🦊"), max_size=30))
def test_the_best_pieces_are_chosen(text):
    plain = PlamoTokenizer(entries(), {})
    ids = plain.encode_batch_fast([text], True)[0].ids
    assert [plain.id_to_token(i) for i in ids] == best(text)
    assert plain.decode(ids, True) == text


def test_special_tokens_bytes_and_streams(tokenizer):
    text = "ab<|plamo:eos|>漢<|plamo:bos|> z🦊"
    ids = tokenizer.encode(text)
    assert [i for i in ids if i < 4] == [2, 1] and tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "ab漢 z🦊"
    for skip in (False, True):
        stream = tokenizer.stream((), skip_special_tokens=skip)
        assert "".join(stream.push([i]) for i in ids) + stream.finish() == tokenizer.decode(ids, skip)
    fox = tokenizer.encode("🦊")
    assert [tokenizer.token_bytes(i) for i in fox] == [bytes([byte]) for byte in "🦊".encode()]
    stream = tokenizer.stream(())
    assert [stream.push([i]) for i in fox[:3]] == ["", "", ""] and stream.finish() == ""
    assert tokenizer.decode(fox[:2]) == "\ufffd" and tokenizer.decode([10**6]) == ""
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("a\ud800")


def test_a_piece_may_look_like_a_byte():
    plain = PlamoTokenizer([*entries(), ("<0x", -1.0, "NORMAL")], {})
    ids = plain.encode_batch_fast(["a<0xb"], True)[0].ids
    assert ids[1] == 300 and plain.decode(ids, True) == "a<0xb"


def test_settings(tokenizer, tmp_path):
    assert tokenizer.eos_token_ids == [2] and tokenizer.vocab_size == 300
    assert tokenizer.special_tokens["bos_token"] == "<|plamo:bos|>" and tokenizer.encode("ab")[0] != 1
    chat = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    settings = {"add_bos_token": True, "eos_token": {"content": "<|plamo:pad|>"}, "chat_template": chat}
    other = Tokenizer.load(write_folder(tmp_path / "other", **settings))
    assert other.eos_token_ids == [3] and other.encode("ab")[0] == 1 and other.encode("ab", False)[0] != 1
    assert other.render_chat([{"role": "user", "content": "x"}]) == "<|plamo:bos|>x"
    ids, texts, types = other.encode_pairs([("a", "b")])[0]
    assert texts == [None, 0, None, 1] and len(ids) == len(types) == 4


@pytest.mark.parametrize("content", ["{", '["a", 0.0]', '{"a": 1}', '["a", "b", "NORMAL"]', ""])
def test_files_that_are_no_vocabulary(tmp_path, content):
    (tmp_path / "tokenizer.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.jsonl cannot be read"):
        Tokenizer.load(tmp_path)
