"""Translates vLLM's flags for engines on several machines, whose meaning depends on other settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from quire.configs.config import ParallelConfig
from quire.configs.peers.reading import Given

_BACKEND = ("--data-parallel-backend", "-dpb")
_EXTERNAL = ("--data-parallel-external-lb", "-dpe")


def engine_settings(without_effect: Iterable[Given], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that follow from flags without an effect of their own. `values` are the settings so far.

    Raises ValueError for flags that do not fit `values`.
    """
    names = {field.name for field in fields(ParallelConfig)}
    parallel = ParallelConfig(**{name: value for name, value in values.items() if name in names})
    found = {}
    for one in without_effect:
        if one.name in _BACKEND and "ray" in one.texts and parallel.names_machines:
            raise ValueError(
                f"{one}: refused: Ray starts no engines on other machines; start those with --headless and "
                "--data-parallel-start-rank there"
            )
        if one.name in _EXTERNAL and not one.texts and parallel.data_parallel_size > 1:
            found |= _rank(one, parallel)
    return found


def _rank(flag: Given, parallel: ParallelConfig) -> dict[str, int]:
    """Return the rank of this server's engine, if it is not set."""
    if parallel.data_parallel_rank is not None:
        return {}
    if parallel.nnodes != parallel.data_parallel_size:
        raise ValueError(f"{flag} needs --data-parallel-rank, the number of this server's engine")
    return {"data_parallel_rank": parallel.node_rank}
