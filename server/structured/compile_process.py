"""The process that compiles structures: `python -m quire.server.structured.compile_process`.

A hostile schema or pattern can cost a library any amount of time and memory, and native code cannot be interrupted:
here such work ends with this process. Reads frames from stdin and answers each on stdout; a frame is 4 bytes of length,
big-endian, and data. The first is the `Vocabulary` (msgpack); each later one is a `Structure` (JSON), answered by an
`Answer` (msgpack).
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire.configs import platforms
from quire.engine.messages import GRAMMAR_LIMITS
from quire.server.structured.lark import StructureError
from quire.server.structured.library_errors import NOTHING, OURS, readable
from quire.server.structured.schema.schema import children, normalize
from quire.server.structured.structure import BEST_EFFORT, Answer, Structure, decoded
from quire.server.structured.to_lark import to_lark
from quire.server.values import Json

MAX_SECONDS = 4.0  # for CPU time for one structure, whatever else the machine does
MAX_MEMORY = 2 << 30  # bytes of address space
MAX_ATTEMPTS = 50  # compilations to locate an error


class Vocabulary(msgspec.Struct, array_like=True):
    """Names that a grammar may use: special tokens by text, the ids that end an output, and the number of ids."""

    specials: dict[str, int]
    eos_ids: list[int]
    size: int


class _Tokens:
    """A tokenizer of single bytes and the special tokens, for `LLTokenizer`: enough to check a grammar."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        special = set(vocabulary.specials.values()) | set(vocabulary.eos_ids)
        ordinary = (i for i in range(vocabulary.size) if i not in special)
        self.tokens = [b""] * vocabulary.size
        for byte, token_id in zip(range(256), ordinary):
            self.tokens[token_id] = bytes([byte])
        for text, token_id in vocabulary.specials.items():
            self.tokens[token_id] = text.encode()
        self.special_token_ids = sorted(special)
        self.eos_token_id = vocabulary.eos_ids[0]

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("texts are never forced")


class Compiler:
    """Compiles structures for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.tokens = LLTokenizer(_Tokens(vocabulary), n_vocab=vocabulary.size, eos_token=vocabulary.eos_ids)

    def compile(self, structure: Structure) -> Answer:
        """Return the grammar if it compiles within the limits."""
        try:
            return self._compile_parts(structure)
        except RecursionError:
            return Answer(None, "it is nested too deeply")
        except MemoryError:
            raise  # this process is at its limit; another may have room
        except Exception as error:  # an unforeseen mistake is also the request's, and must not end the process
            traceback.print_exc()
            return Answer(None, f"it cannot be compiled: {type(error).__name__}: {str(error)[:300]}")

    def _compile_parts(self, structure: Structure) -> Answer:
        answer = self._compile(_resolved(structure, lambda part: True))
        if answer.grammar is not None or structure.kind != "structural_tag":
            return answer
        errors: dict[str, str] = {}

        def compiles(part: dict[str, Any]) -> bool:
            alone = self._compile(Structure(kind="structural_tag", value=part["elements"][0]))
            if alone.error is not None:
                errors[part["name"]] = alone.error
            return alone.error is None

        resolved = _resolved(structure, compiles)
        return msgspec.structs.replace(self._compile(resolved), unenforced=list(errors.items())) if errors else answer

    def _compile(self, structure: Structure) -> Answer:
        schemas: list[tuple[str, Json]] = []
        try:
            grammar = to_lark(structure, self.vocabulary.specials, self.vocabulary.eos_ids, schemas)
        except StructureError as error:
            return Answer(None, str(error))
        is_own = structure.kind == "grammar" and "::=" not in structure.value and structure.after is None
        if (error := self._error(grammar, is_own)) is None:
            return Answer(grammar)
        if structure.whitespace is not None:
            space = self._compile(Structure(kind="regex", value=structure.whitespace))
            if space.error is not None:
                return Answer(None, f"whitespace_pattern: {space.error}")
        if structure.kind == "json_schema":
            return Answer(None, self._located(structure, error))
        for place, schema in schemas:  # within a structural tag
            alone = msgspec.structs.replace(structure, kind="json_schema", value=schema, after=None)
            if (inner := self._compile(alone)).error is not None:
                return Answer(None, f"{place}{inner.error}")
        return Answer(None, error)

    def _error(self, grammar: str, is_own: bool = False) -> str | None:
        """Return why a grammar does not compile; None if it does. `is_own`: a client wrote all but its first line."""
        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first step may also exceed a limit
        return readable(matcher.get_error(), 1 if is_own else None) if matcher.is_error() else None

    def _located(self, structure: Structure, error: str) -> str:
        """Return `error` with the path of the smallest subschema that has it, within a limited number of attempts."""
        schema = normalize(structure.value, not structure.additional_properties)
        path, definitions, attempts = "#", schema.get("$defs", {}), MAX_ATTEMPTS
        found = True
        while found and attempts > 0:
            found = False
            for step, child in children(schema):
                if not isinstance(child, dict):
                    continue
                attempts -= 1
                try:
                    inner = self._error(to_lark(_alone(structure, child, definitions), {}, self.vocabulary.eos_ids))
                except StructureError:  # the context of the whole schema is missing
                    continue
                if inner is not None and (NOTHING not in inner or NOTHING in error):
                    path, schema, error, found = f"{path}/{step}", child, inner, True
                    break
        keyword = self._keyword(structure, schema, definitions, error)
        return f"at {path}: {keyword}{error}"

    def _keyword(self, structure: Structure, schema: Json, definitions: dict[str, Any], error: str) -> str:
        """Return the keyword without which `schema` has no such error, before a colon; empty if no single one is the
        cause.
        """
        if NOTHING in error or error in OURS or not isinstance(schema, dict):
            return ""
        for keyword in [name for name in schema if name not in ("$defs", "type")]:
            rest = {name: value for name, value in schema.items() if name != keyword}
            try:
                inner = self._error(to_lark(_alone(structure, rest, definitions), {}, self.vocabulary.eos_ids))
            except StructureError:
                continue
            if inner is None:
                return f"{keyword}: "
        return ""


def _resolved(structure: Structure, enforced: Callable[[dict[str, Any]], bool]) -> Structure:
    """Return the structure with the first or the second element of every best-effort part."""

    def resolved(node: Json) -> Any:
        if isinstance(node, list):
            return [resolved(item) for item in node]
        if not isinstance(node, dict):
            return node
        if node.get("type") == BEST_EFFORT and node.keys() == {"type", "elements", "name"}:
            return node["elements"][0 if enforced(node) else 1]
        return {key: value if key in ("json_schema", "schema") else resolved(value) for key, value in node.items()}

    if structure.kind != "structural_tag":
        return structure
    return msgspec.structs.replace(structure, value=resolved(structure.value))


def _alone(structure: Structure, schema: dict[str, Any], definitions: dict[str, Any]) -> Structure:
    value = {**schema, "$defs": definitions}
    return msgspec.structs.replace(structure, value=value, after=None, additional_properties=True)


def main() -> None:
    platforms.limit_memory(MAX_MEMORY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = msgspec.msgpack.decode(_read(source), type=Vocabulary)
    compiler = Compiler(vocabulary)
    while frame := _read(source):
        # ends this process also within native code: nothing handles the signal
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        answer = compiler.compile(decoded(frame))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(framed(answer))
        sink.flush()


def framed(message: Json) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "big") + data


def _read(source: BinaryIO) -> bytes:
    """Return the next frame; empty at the end of the input."""
    return source.read(int.from_bytes(source.read(4), "big"))


if __name__ == "__main__":
    main()
