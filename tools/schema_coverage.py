"""Prints which cases of the public JSON Schema Test Suite structured output enforces, as a table:
`python tools/schema_coverage.py SUITE`. SUITE is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite.

A case's schema is compiled or refused. If it is compiled, each invalid instance must be rejected; a valid one should be
accepted, written as compact JSON with the properties in the order of the instance. Objects are as open as in JSON
Schema (`additional_properties`). Exits with 1 if an invalid instance
is accepted.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from llguidance import LLMatcher, LLTokenizer

from quire.server.structured.compile_process import Compiler, Vocabulary
from quire.server.structured.structure import Structure

BYTES, END = 256, 256


@dataclass
class Row:
    """Holds the counts of one keyword."""

    schemas: int = 0
    refused: int = 0
    valid: int = 0
    accepted: int = 0
    invalid: int = 0
    wrongly_accepted: int = 0

    def __add__(self, other: Row) -> Row:
        return Row(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def line(self, name: str) -> str:
        cells = self.schemas - self.refused, self.refused, f"{self.accepted} of {self.valid}", self.wrongly_accepted
        return f"| {name} | " + " | ".join(map(str, cells)) + f" of {self.invalid} |"


class Judge:
    """Compiles schemas over single bytes."""

    def __init__(self) -> None:
        self.compiler = Compiler(Vocabulary({}, [END], BYTES + 1))
        self.tokens: LLTokenizer = self.compiler.tokens

    def count(self, schema: Any, tests: list[dict[str, Any]]) -> Row:
        grammar = self.compiler.compile(Structure(kind="json_schema", value=schema, additional_properties=True)).grammar
        if grammar is None:
            return Row(schemas=1, refused=1)
        row, start = Row(schemas=1), LLMatcher(self.tokens, grammar, log_level=0)
        for test in tests:
            text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False).encode()
            matcher = start.deep_copy()
            accepted = matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
            if test["valid"]:
                row += Row(valid=1, accepted=accepted)
            else:
                row += Row(invalid=1, wrongly_accepted=accepted)
        return row


def main(suite: str) -> int:
    judge, rows = Judge(), defaultdict[str, Row](Row)
    for path in sorted(Path(suite, "tests", "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            rows[path.stem] += judge.count(group["schema"], group["tests"])
    total = sum(rows.values(), Row())
    print(
        "| file of the suite | schemas enforced | refused | valid accepted | invalid accepted |\n|---|---|---|---|---|"
    )
    for name, row in rows.items():
        print(row.line(name))
    print(total.line("**all**"))
    return int(total.wrongly_accepted > 0)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
