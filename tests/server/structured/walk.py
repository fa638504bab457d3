"""Answers of a model that knows nothing: random tokens among those that a grammar allows."""

from __future__ import annotations

import random

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.engine.messages import GRAMMAR_LIMITS
from quire.server.structured.compile_process import Compiler, Vocabulary
from quire.server.structured.lark import Builder
from quire.server.structured.structure import Structure, decoded, encoded

# several tokens for the same text, across the borders of JSON's tokens
PIECES = [
    '"',
    '":',
    '",',
    '"}',
    '{"',
    "[]",
    "}}",
    '": "',
    '","',
    "tr",
    "ue",
    "null",
    "10",
    "0.5",
    "\\u00",
    "ä",
    " a",
    "ab",
]
SPECIALS = {"<|eos|>": 300, "<tool>": 301, "</tool>": 302, "</think>": 303}
SPECIALS |= {f"<|{name}|>": 304 + i for i, name in enumerate(("end", "start", "channel", "message", "constrain"))}
EOS, SIZE = 300, 320
CLOSING = frozenset(b'"}],')


class Tokens:
    """A vocabulary of all bytes, some pieces and some special tokens, in the form that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = EOS
    special_token_ids = sorted(SPECIALS.values())

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES]
        self.tokens += [b""] * (SIZE - len(self.tokens))
        for text, token_id in SPECIALS.items():
            self.tokens[token_id] = text.encode()


TOKENS = Tokens()
TOKENIZER = LLTokenizer(TOKENS, n_vocab=SIZE, eos_token=[EOS])
COMPILER = Compiler(Vocabulary(SPECIALS, [EOS], SIZE))


def matcher(structure: Structure) -> LLMatcher:
    """A matcher for the compiled structure. Raises ValueError with the reason if it does not compile."""
    answer = COMPILER.compile(decoded(encoded(structure)))
    if answer.grammar is None:
        raise ValueError(answer.error)
    found = LLMatcher(TOKENIZER, answer.grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
    assert not found.is_error(), found.get_error()
    return found


def allowed(state: LLMatcher) -> list[int]:
    bits = int.from_bytes(state.compute_bitmask(), "little")
    return [token_id for token_id in range(SIZE) if bits >> token_id & 1]


def ids(text: str) -> list[int]:
    """Special tokens and bytes."""
    pieces = Builder(SPECIALS).pieces(text)
    return [token for piece in pieces for token in ([piece] if isinstance(piece, int) else piece.encode())]


def accepts(structure: Structure, text: str) -> bool:
    """Whether the whole text matches."""
    state, token_ids = matcher(structure), ids(text)
    return state.try_consume_tokens(token_ids) == len(token_ids) and state.is_accepting()


def walk(structure: Structure, seed: int, most: int = 400) -> tuple[bytes, bool]:
    """A random answer, and whether it ended by itself within `most` tokens. Ends strings, arrays and objects early."""
    state, choose, text = matcher(structure), random.Random(seed), b""
    for _ in range(most):
        choices = allowed(state)
        assert choices, (text, state.get_error())
        if EOS in choices and choose.random() < 0.7:
            return text, True
        short = [
            token_id for token_id in choices if TOKENS.tokens[token_id][:1] and TOKENS.tokens[token_id][0] in CLOSING
        ]
        token_id = choose.choice(short if short and choose.random() < 0.4 else choices)
        if token_id == EOS:
            return text, True
        assert state.consume_token(token_id), (text, state.get_error())
        text += TOKENS.tokens[token_id]
    return text, False
