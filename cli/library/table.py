"""Implements `quire list`, which lists the models on this machine."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from quire.checkpoints.library.installed import Installed, installed
from quire.checkpoints.sizes import format_bytes
from quire.cli.main import Parser

_AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def main(argv: list[str]) -> int:
    """Run `quire list ARGV...`."""
    parser = Parser(
        prog="quire list",
        description="List the models on this machine: the Hub's cache, packages, your names by `quire cp`, and the "
        "stores of Ollama, llama.cpp and LM Studio. NAME is what `quire serve` takes.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: name, size in bytes, modified, source")
    arguments = parser.parse_args(argv)
    try:
        found = installed()
    except ValueError as error:
        print(f"quire list: error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return 0
    print(aligned([("NAME", "SIZE", "MODIFIED", "SOURCE"), *map(_row, found)]))
    return 0


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Return the rows as lines with columns of equal width."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def age(seconds: float) -> str:
    """Return a duration in its largest unit: `3 days`, `1 hour`, `under a minute`."""
    for unit, name in _AGES:
        if seconds >= unit:
            count = int(seconds / unit)
            return f"{count} {name}{'s' if count > 1 else ''}"
    return "under a minute"


def _row(one: Installed) -> tuple[str, ...]:
    size = format_bytes(one.size) if one.size else "-"
    return one.name, size, f"{age(time.time() - one.modified)} ago", one.source
