"""Makes the page of other servers' flags from `configs/peers/`: `python -m tools.site.other_flags` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quire.configs.options import all_options
from quire.configs.peers.groups import Group, Kind
from quire.configs.peers.table import SERVERS, rows_of

_HEAD = """# Flags of other servers

`quire serve` takes the flags of vLLM, SGLang, llama-server and TGI, and reads the variables of llama.cpp
(`LLAMA_ARG_...`) and Ollama. In a YAML file of `--config` and in `LLM(...)`, vLLM's and SGLang's names work, too.
Flags, `QUIRE_` variables and files go before variables of another server. This page is made from `configs/peers/` when
this site is built, and a test fails when a server's `--help` has a flag without a row.

- **same**: quire has the flag.
- **renamed**: it sets what the last column says.
- **no effect**: it asks for what is done anyway, or tunes what quire does not have. The server starts with one WARNING
  line; with `--strict-flags` it does not start.
- **refused**: it would change answers, routes or safety in a way that quire cannot; the server does not start.
"""


def page() -> str:
    """Return the text of the document."""
    parts = [_HEAD]
    for server in SERVERS:
        parts.append(f"\n## {server}\n\n| flag | effect | here |\n|---|---|---|\n")
        parts.extend(_rows(server))
    return "".join(parts)


def _rows(server: str) -> Iterator[str]:
    """Yield a row for each group of flags."""
    names: dict[int, tuple[Group, list[str]]] = {}
    for row in rows_of(server):
        names.setdefault(id(row.group), (row.group, []))[1].append(row.name)
    for group, found in names.values():
        here = "" if group.kind == Kind.SAME else _here(group)
        yield f"| {_code(found)} | {group.kind} | {here} |\n"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _here(group: Group) -> str:
    note = re.sub(r"`[^`]*`|--[a-z][a-z-]+[a-z]", lambda match: _link(match[0]), group.note.replace("|", "\\|"))
    if group.harmless:
        note += f"; no effect: {_code(list(group.harmless))}"
    if group.kind != Kind.RENAMED:
        return note
    option = all_options()[group.option]
    value = f" {group.value}" if group.value not in (None, True, False) else ""
    flag = f"--no-{option.flag[2:]}" if group.value is False else option.flag
    key = f" `{group.key}`" if option.unit == "mapping" and group.key else ""
    return f"[`{flag}{value}`](all-flags.md#{option.flag[2:]}){key}" + (f"; {note}" if note else "")


def _link(flag: str) -> str:
    """Return a link to quire's flag, or another server's flag as code. Text that is code already stays as it is."""
    if flag.startswith("`"):
        return flag
    option = all_options().get(flag[2:].replace("-", "_"))
    return f"`{flag}`" if option is None else f"[`{flag}`](all-flags.md#{flag[2:]})"


if __name__ == "__main__":
    print(page())
