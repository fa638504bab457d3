"""Tests incremental decoding against the full decode."""

import copy
import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.text.detokenizer import Detokenizer, StopStrings
from quire.server.text.incremental_decoding import (
    ByteDecoding,
    CleanUpStream,
    PieceDecoding,
    WindowDecoding,
    byte_alphabet,
    clean_up_spaces,
)
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.server.tokenizer_kinds import CORPUS, KINDS
from tests.helpers.server.whole_text import whole_text

EXACT = [name for name in KINDS if name != "suffix_bpe"]
TEXTS = [*CORPUS, "🦊🦊 ﷽ é", " ' s 's . , do not n't ' ' x '", "a  b", "", "x\ufffdy"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: Tokenizer.load(build(root / name)) for name, build in KINDS.items()}


@st.composite
def id_lists(draw, tokenizer):
    """Random ids, including bytes and special tokens, or the ids of a text with a few swapped."""
    if draw(st.booleans()):
        return draw(st.lists(st.one_of(st.integers(0, tokenizer.vocab_size + 2), st.integers(0, 300)), max_size=24))
    ids = tokenizer.encode(draw(st.sampled_from(TEXTS)), draw(st.booleans()))[:40]
    for place in draw(st.lists(st.integers(0, 39), max_size=2)):
        if place < len(ids):
            ids[place] = draw(st.integers(0, tokenizer.vocab_size - 1))
    return ids


def chunked(draw, ids):
    while ids:
        size = draw(st.integers(1, 5))
        yield ids[:size]
        ids = ids[size:]


def run(detokenizer, chunks):
    return "".join([detokenizer.push(chunk) for chunk in chunks]) + detokenizer.finish()


def test_the_kinds_have_the_streams_meant_for_them(tokenizers):
    kinds = {name: type(tokenizer._decoding) for name, tokenizer in tokenizers.items()}
    assert kinds["byte_level"] is kinds["llama3"] is ByteDecoding
    assert kinds["suffix_bpe"] is WindowDecoding
    assert {kinds[name] for name in EXACT if name not in ("byte_level", "llama3")} == {PieceDecoding}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_pushes_add_up_to_the_full_decode(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    ids = data.draw(id_lists(tokenizer))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip)
    assert run(detokenizer, chunked(data.draw, ids)) == whole_text(tokenizer, ids, skip)
    assert detokenizer.num_released == detokenizer.num_tokens == len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_in_the_context_of_a_prompt(tokenizers, kind, data):
    """Prompt text and output text add up to the decode of both. (If a prompt ends inside a character or a clean-up
    spans its end, its text is not a prefix of that; another test covers such prompts.)
    """
    tokenizer = tokenizers[kind]
    prompt, ids = data.draw(id_lists(tokenizer)), data.draw(id_lists(tokenizer))
    skip = data.draw(st.booleans())
    before, both = tokenizer.decode(prompt, skip), whole_text(tokenizer, prompt + ids, skip)
    text = run(Detokenizer(tokenizer, prompt, skip_special_tokens=skip), chunked(data.draw, ids))
    if both.startswith(before) and not before.endswith("\ufffd") and not ends_in_byte_run(tokenizer, prompt, skip):
        assert before + text == both


def ends_in_byte_run(tokenizer, ids, skip):
    decoding = tokenizer._decoding
    visible = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    return isinstance(decoding, PieceDecoding) and any(isinstance(decoding.piece(i), bytes) for i in visible[-1:])


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "suffix_bpe"])
def test_every_pair_of_bytes_at_the_end(tokenizers, kind):
    """Two bytes that begin a character are left out; any others are decoded, as by Python's strict decoder."""
    tokenizer = tokenizers[kind]
    token_of = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    letter = tokenizer.encode("a", False)
    for first, second in itertools.product((0x80, 0xC1, 0xC3, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xFF), range(0x80, 0x100)):
        if bytes([first]) in token_of and bytes([second]) in token_of:
            ids = [*letter, token_of[bytes([first])], token_of[bytes([second])]]
            assert run(Detokenizer(tokenizer, []), [[i] for i in ids]) == whole_text(tokenizer, ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
def test_output_completes_a_character_that_the_prompt_began(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("x🦊🦊y", False)
    for cut in range(1, len(ids)):
        prompt, output = ids[:cut], ids[cut:]
        begun = b"".join(map(tokenizer.token_bytes, prompt)).decode(errors="ignore").removeprefix(" ")
        assert run(Detokenizer(tokenizer, prompt), [[i] for i in output]) == "x🦊🦊y".removeprefix(begun)


class Characters:
    """A stream whose ids are code points."""

    held = False

    def push(self, ids):
        return "".join(map(chr, ids))

    def finish(self):
        return ""


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="  ''.?!,ntmsvreo", max_size=16), data=st.data())
def test_clean_up_in_parts(text, data):
    stream = CleanUpStream(Characters())
    assert "".join(
        [stream.push(part) for part in chunked(data.draw, list(map(ord, text)))]
    ) + stream.finish() == clean_up_spaces(text)


def test_clean_up_of_every_short_text():
    for size in range(7):
        for characters in itertools.product(" 'nt", repeat=size):
            stream = CleanUpStream(Characters())
            assert "".join([stream.push([ord(c)]) for c in characters]) + stream.finish() == clean_up_spaces(
                "".join(characters)
            )


@settings(max_examples=60, deadline=None)
@given(text=st.sampled_from([line for line in TEXTS if "\ufffd" not in line]), prompt=st.sampled_from(["", "a fox"]))
def test_window_stream_on_text(tokenizers, text, prompt):
    tokenizer = tokenizers["suffix_bpe"]
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    whole = run(Detokenizer(tokenizer, prompt_ids), [[i] for i in ids])
    assert tokenizer.decode(prompt_ids) + whole == tokenizer.decode(prompt_ids + ids)


def test_no_character_is_split(tokenizers):
    for kind in ("byte_level", "llama3", "llama2", "gemma"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("é 🦊 你好 👩‍👩‍👧!", False)
        detokenizer = Detokenizer(tokenizer, [1])
        pushed = [detokenizer.push([i]) for i in ids]
        assert "\ufffd" not in "".join(pushed)
        assert len([text for text in pushed if text]) > 3


def test_an_unfinished_character_at_the_end_is_left_out(tokenizers):
    for kind in ("byte_level", "llama2"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("a🦊", False)[:-1]
        detokenizer = Detokenizer(tokenizer, [])
        assert detokenizer.push(ids) == "a"
        assert detokenizer.num_released < len(ids)
        assert detokenizer.finish() == ""
        assert detokenizer.num_released == len(ids)


def windows(tokenizers):
    """Tokenizers of bytes without a stream of their own, as those in Python are: byte-level BPE whose tokens are
    strings or bytes, and SentencePiece, which writes U+FFFD for each byte of no character.
    """
    byte_level, gemma = tokenizers["byte_level"], tokenizers["gemma"]
    alphabet = byte_alphabet()

    def bytes_of(token_id):
        token = byte_level._backend.id_to_token(token_id)
        return bytes(alphabet[c] for c in token) if token and alphabet.keys() >= set(token) else token

    def pieces(ids, skip):
        data = b"".join([gemma.token_bytes(i) for i in ids if not (skip and i in gemma.special_ids)])
        return re.sub("[\udc80-\udcff]", "\ufffd", data.decode(errors="surrogateescape"))

    for tokenizer, decode, token_of, is_byte_level in (
        (byte_level, byte_level.decode, byte_level._backend.id_to_token, True),
        (byte_level, byte_level.decode, bytes_of, False),
        (gemma, pieces, gemma._backend.id_to_token, False),
    ):
        window = copy.copy(tokenizer)
        window.decode, window._decoding = decode, WindowDecoding(decode, token_of, is_byte_level)
        yield window, tokenizer


CHARACTERS = st.text(st.sampled_from("ab .é你界🦙🦊👩\u200d\u0301\ufffd\U0010ffff"), min_size=1, max_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte_level", "llama3", "llama2", "llama2_class_no_prefix", "gemma", "windows"])
@settings(max_examples=40, deadline=None)
@given(text=CHARACTERS, prompt=CHARACTERS, data=st.data())
def test_every_cut_of_a_text_is_its_longest_prefix_in_utf_8(tokenizers, kind, text, prompt, data):
    """In pieces or whole, and when the prompt has the first tokens of the text."""
    kinds = windows(tokenizers) if kind == "windows" else [(tokenizers[kind], tokenizers[kind])]
    for tokenizer, exact in kinds:
        prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode("x" + text, False)
        raw = [exact.token_bytes(token_id) for token_id in ids]
        begun = data.draw(st.integers(0, len(ids)))
        before = b"".join(raw[:begun]).decode(errors="ignore")
        known = prompt_ids + ids[:begun]
        for cut in range(begun, len(ids) + 1):
            expected = b"".join(raw[:cut]).decode(errors="ignore")[len(before) :]
            assert run(Detokenizer(tokenizer, known), [[token_id] for token_id in ids[begun:cut]]) == expected
            assert run(Detokenizer(tokenizer, known), [ids[begun:cut]]) == expected
            assert run(Detokenizer(tokenizer, known, ["never comes"]), [ids[begun:cut]]) == expected
        assert tokenizer.decode_characters(known).endswith(before)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_a_marker_ends_the_text_before_it(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = [*tokenizer.encode("a🦊", False)[:-1], marker := max(tokenizer.special_ids), tokenizer.encode("b", False)[-1]]
    end = tokenizer.token_bytes(marker).decode() + tokenizer.token_bytes(ids[-1]).decode()
    for text_ends, text in ((frozenset([marker]), "a" + end), (frozenset(), "\ufffd" + end)):
        detokenizer = Detokenizer(tokenizer, [5], skip_special_tokens=False, text_ends=text_ends)
        assert run(detokenizer, [[token_id] for token_id in ids]).endswith(text)
        assert detokenizer.num_released == len(ids)


def test_bytes_that_no_character_has_stay_visible(tokenizers):
    for kind in ("byte_level", "llama2"):
        tokenizer = tokenizers[kind]
        token_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
        ids = [token_of[bytes([byte])] for byte in (0x61, 0xF0, 0x9F, 0x62, 0xFF)]
        assert run(Detokenizer(tokenizer, [5]), [ids]).count("\ufffd") in (2, 3)
        assert run(Detokenizer(tokenizer, [5]), [ids]) == tokenizer.decode(ids)


class TestStopStrings:
    def reference(self, tokenizer, ids, stop, include, min_tokens):
        """The reference definition: one token at a time with full decodes."""
        before = ""
        for count in range(1, len(ids) + 2):
            last = count > len(ids)
            text = whole_text(tokenizer, ids)
            if not last:
                stream = tokenizer.stream(())
                text = stream.push(ids[:count])
            if min(count, len(ids)) > min_tokens:
                ends = [
                    (text.index(s, max(0, len(before) - len(s) + 1)) + len(s), i)
                    for i, s in enumerate(stop)
                    if s in text[max(0, len(before) - len(s) + 1) :]
                ]
                if ends:
                    end, i = min(ends)
                    return text[: end if include else end - len(stop[i])], stop[i], min(count, len(ids))
            before = text
        return text, None, len(ids)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["byte_level", "llama2", "word_piece"])
    @settings(max_examples=120, deadline=None)
    @given(data=st.data())
    def test_against_the_definition(self, tokenizers, kind, data):
        tokenizer = tokenizers[kind]
        ids = data.draw(id_lists(tokenizer))
        text = tokenizer.decode(ids)
        spans = st.builds(
            lambda start, size: text[start : start + size], st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)
        )
        stop = [
            s
            for s in data.draw(
                st.lists(st.one_of(spans, st.sampled_from(["\n\n", "o", "ou", "the end", "aab"])), max_size=3)
            )
            if s
        ]
        include, min_tokens = data.draw(st.booleans()), data.draw(st.sampled_from([0, 0, 1, 3, 8]))
        expected, stopped, num_tokens = self.reference(tokenizer, ids, stop, include, min_tokens)
        detokenizer = Detokenizer(tokenizer, [], stop, include, min_tokens=min_tokens)
        emitted = ""
        for chunk in chunked(data.draw, ids):
            emitted += detokenizer.push(chunk)
            assert expected.startswith(emitted)  # sent text is never revised
        emitted += detokenizer.finish()
        assert (emitted, detokenizer.stopped, detokenizer.num_tokens) == (expected, stopped, num_tokens)
        assert detokenizer.num_released == num_tokens

    def test_across_tokens(self, tokenizers):
        tokenizer = tokenizers["byte_level"]
        detokenizer = Detokenizer(tokenizer, [], ["<stop>"])
        ids = tokenizer.encode("abc <sto <stop> def")
        pushed = [detokenizer.push([i]) for i in ids]
        assert "".join(pushed) == "abc <sto " and detokenizer.stopped == "<stop>"
        assert detokenizer.finish() == ""
        assert tokenizer.decode(ids[: detokenizer.num_tokens]).endswith("<stop>")

    def test_a_stop_string_that_does_not_count_yet_is_not_held_back(self, tokenizers):
        tokenizer = tokenizers["byte_level"]
        detokenizer = Detokenizer(tokenizer, [], ["ab", "longer"], min_tokens=10)
        ids = [*tokenizer.encode("a"), *tokenizer.encode("b")]
        assert [detokenizer.push([i]) for i in ids] == ["", "ab"]

    def test_tokens_are_released_with_their_text(self, tokenizers):
        tokenizer = tokenizers["byte_level"]
        detokenizer = Detokenizer(tokenizer, [], ["xyz!"])
        emitted = ""
        for token_id in tokenizer.encode("ab xyz xyz? 🦊 xy"):
            emitted += detokenizer.push([token_id])
            released = tokenizer.encode("ab xyz xyz? 🦊 xy")[: detokenizer.num_released]
            assert emitted.startswith(tokenizer.decode(released).rstrip("\ufffd"))
        assert emitted.endswith("🦊 ")
        assert detokenizer.num_released < detokenizer.num_tokens
        assert detokenizer.finish() == "xy"
        assert detokenizer.num_released == detokenizer.num_tokens


def test_cost_per_token_does_not_grow(tokenizers):
    """The last thousand of 20,000 tokens cost as much as the first (with ample room for a busy machine)."""
    for kind in ("byte_level", "llama2", "word_piece"):
        tokenizer = tokenizers[kind]
        ids = (tokenizer.encode(" ".join(CORPUS), False) * 200)[:20_000]
        detokenizer = Detokenizer(tokenizer, [], ["never comes", "\x00"])

        def cost(part, detokenizer=detokenizer):
            best = float("inf")
            for start in range(0, len(part), 250):
                begin = time.perf_counter()
                for token_id in part[start : start + 250]:
                    detokenizer.push([token_id])
                best = min(best, time.perf_counter() - begin)
            return best

        first, _, last = cost(ids[:1000]), cost(ids[1000:19_000]), cost(ids[19_000:])
        assert last < 5 * first


# ---- stop strings against their plain definition


def plainly(parts: list[str], stop: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """The text up to the stop string that is completed first, and that string. Checks every suffix of every prefix."""
    text = ""
    for number, part in enumerate(parts, start=1):
        for length in range(len(text) + 1, len(text) + len(part) + 1):
            so_far = (text + part)[:length]
            hit = next((one for one in stop if so_far.endswith(one)), None)
            if hit is not None and number > min_tokens:
                return so_far if include else so_far[: -len(hit)], hit
        text += part
    return text, None


class _Parts:
    """A tokenizer whose token i is parts[i]."""

    def __init__(self, parts: list[str]):
        self.parts = parts

    def stream(self, *options: object) -> "_Parts":
        return self

    held = False

    def push(self, ids: tuple[int, ...]) -> str:
        return "".join(self.parts[i] for i in ids)

    def finish(self) -> str:
        return ""


LETTERS = st.text(alphabet="ab", max_size=5)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(
    parts=st.lists(LETTERS, max_size=12),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=6),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings_are_found_as_their_definition_says(parts, stop, include, min_tokens):
    detokenizer = Detokenizer(_Parts(parts), [], stop, include, min_tokens=min_tokens)
    sent = ""
    for i in range(len(parts)):
        sent += detokenizer.push([i])
        if detokenizer.stopped is not None:
            break
        so_far = "".join(parts[: i + 1])
        grows = [
            k for k in range(1, len(so_far) + 1) if any(len(one) > k and one.startswith(so_far[-k:]) for one in stop)
        ]
        assert sent == so_far[: len(so_far) - max(grows, default=0)], (
            "sent is all but the longest end that may grow into a stop string"
        )
    sent += detokenizer.finish()
    assert (sent, detokenizer.stopped) == plainly(parts, stop, include, min_tokens)


def test_64_stop_strings_cost_what_one_does():
    """On a text that repeatedly begins all of them: one automaton step per character, plus or minus one."""
    text = "word wor 1 wo\n" * 2000

    class Counting(StopStrings):
        num_steps = 0

        def step(self, state: int, char: str) -> int:
            self.num_steps += 1
            return super().step(state, char)

    one, many = (Counting([f"word {i} is complete" for i in range(number)]) for number in (1, 64))
    for stop in (one, many):
        stop.num_steps = 0
        stop.scan(0, text, True)
    assert many.num_steps <= 1.5 * one.num_steps <= 1.5 * len(text)
