"""Dialect-neutral output constraint."""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from quire.server.values import Json

MAX_BYTES = 2**18  # per structure as JSON

# Type of a part of a structural tag that the server makes, with "elements" and a "name": its first element, or the
# second if the first cannot be enforced.
BEST_EFFORT = "best_effort"
# Type of a part for the arguments of a tool's call: "content", which holds them to the "schema" of the tool "name".
ARGUMENTS = "arguments"

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """The output must match `value` from its first character to its last.

    | kind           | value                                                                              |
    |----------------|------------------------------------------------------------------------------------|
    | json_schema    | a JSON Schema (draft 2020-12): an object or a bool                                 |
    | json_object    | None: any JSON object                                                              |
    | regex          | a pattern for the whole output                                                     |
    | choice         | a list of texts                                                                    |
    | grammar        | EBNF as in XGrammar and llama.cpp (GBNF), or Lark as in llguidance                 |
    | structural_tag | XGrammar's JSON: {"type": "structural_tag", "format": ...}, the older form with    |
    |                | "structures" and "triggers", or the inner format alone                             |

    `param` is the request field that holds it, for error messages.

    `after` is the end of a part that the structure does not constrain (thinking): token ids, which must be sampled in
    this order, or a text. The structure applies to the output after its first occurrence.
    """

    kind: Kind
    value: Json = None
    param: str = "structured_outputs"
    additional_properties: bool = False  # objects that a schema describes may have others, unless it says otherwise
    compact: bool = False  # no whitespace between JSON tokens
    whitespace: str | None = None  # pattern of the whitespace that is allowed between JSON tokens; None: the default
    after: list[int] | str | None = None


def encoded(structure: Structure) -> bytes:
    """Return the structure as JSON: numbers in a schema may have more than 64 bits, which msgpack does not have.

    Raises TypeError, ValueError, RecursionError.
    """
    return json.dumps(msgspec.structs.asdict(structure), ensure_ascii=False, separators=(",", ":")).encode()


def decoded(data: bytes) -> Structure:
    return Structure(**json.loads(data))


class Answer(msgspec.Struct, array_like=True):
    """The grammar of a structure, or the reason why there is none. `unenforced`: the best-effort parts that the grammar
    leaves free, with the reasons.
    """

    grammar: str | None
    error: str | None = None
    unenforced: list[tuple[str, str]] = []
