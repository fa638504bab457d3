"""Makes the page of every key of a model's files and its effect: `python -m tools.site.model_files` prints it."""

from __future__ import annotations

from quire.checkpoints.gguf.defaults import DEFAULTS
from quire.checkpoints.gguf.keys import ARCHITECTURE, GENERAL
from quire.checkpoints.honoured import FILES

_HEAD = """# Files of models, key by key

Made from `checkpoints/honoured.py`, `checkpoints/gguf/keys.py` and `checkpoints/gguf/defaults.py` when this site is
built. A test fails when transformers, sentence-transformers or llama.cpp's `gguf` package know a key without an entry.
Keys of config.json belong to the families ([models.md](models.md)); their types and ranges are in
`checkpoints/config_schema.py`.

- **honoured**: it does what it does in the library that wrote it.
- **refused**: the server does not start, and says which key of which file.
- **without effect**: it would change nothing, or something that `quire serve` decides.
"""
_GGUF = """
## GGUF

A key that begins with the architecture's name is *honoured* by every architecture that has it. In a file of
another architecture it is refused, unless its value changes nothing. Each value must be of the type and in the range
shown. Keys that are not listed are reported in the log.

The last column has the value of a key that a file leaves out: llama.cpp's default, or a size that the tensors have.
Keys without one are required by the architectures that read them, or change nothing if they are missing.

| key | value | effect | | left out |
|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of the document."""
    parts = [_HEAD]
    for name, entries in FILES.items():
        rows = [f"| `{key}` | {entry.effect} | {entry.note} |\n" for key, entry in sorted(entries.items())]
        parts.append(f"\n## {name}\n\n| key | effect | |\n|---|---|---|\n{''.join(rows)}")
    keys = [(f"*arch*.{key}", entry) for key, entry in ARCHITECTURE.items()] + list(GENERAL.items())
    rows = [f"| {_code(key)} | {one.rule} | {one.effect} | {one.note} | {_default(key)} |\n" for key, one in keys]
    return "".join([*parts, _GGUF, *rows])


def _default(key: str) -> str:
    """Return the default values of a missing key, with the architectures that have each."""
    found = []
    for default in DEFAULTS.get(key.removeprefix("*arch*."), ()):
        kinds = f" ({', '.join(default.kinds)})" if default.kinds else ""
        found.append((default.note or str(default.value).lower()) + kinds)
    return "; ".join(found)


def _code(key: str) -> str:
    return f"*arch*.`{key.removeprefix('*arch*.')}`" if key.startswith("*arch*") else f"`{key}`"


if __name__ == "__main__":
    print(page())
