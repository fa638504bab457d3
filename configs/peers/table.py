"""Builds the table of other servers' flags and environment variables, with a row for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from quire.configs.peers import llamacpp, ollama, others, sglang, tgi, vllm
from quire.configs.peers.groups import Group, Kind

SERVERS = {
    "vLLM": vllm.GROUPS,
    "SGLang": sglang.GROUPS,
    "llama.cpp": llamacpp.GROUPS,
    "Ollama": ollama.GROUPS,
    "TGI": tgi.GROUPS,
    "other programs": others.GROUPS,
}
SWITCH, ONE, OPTIONAL, SEVERAL = "", "=", "=?", "=+"


@dataclass(frozen=True, slots=True)
class Row:
    """Describes one flag or variable of one server."""

    name: str
    takes: str
    group: Group

    @property
    def kind(self) -> Kind:
        return self.group.kind

    @property
    def is_variable(self) -> bool:
        return not self.name.startswith("-")


def rows_of(server: str) -> Iterator[Row]:
    """Yield the rows of a server of `SERVERS`, in the order of its file."""
    for group in SERVERS[server]:
        for spec in group.names.split():
            name, takes = re.fullmatch(r"([^=]+)(=?.*)", spec).groups()
            if name.startswith("--[no-]"):
                yield Row(name.replace("[no-]", ""), takes, group)
                yield Row(name.replace("[no-]", "no-"), takes, group)
            else:
                yield Row(name, takes if name.startswith("-") else ONE, group)


@cache
def rows() -> dict[str, Row]:
    """Return the first row of each name. Rows of several servers with the same name have the same meaning."""
    found: dict[str, Row] = {}
    for server in SERVERS:
        for row in rows_of(server):
            found.setdefault(row.name, row)
    return found
