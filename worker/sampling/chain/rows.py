"""Requests with llama.cpp's samplers: which of them run for a row, in which order, and mirostat's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import Dry, NewRequest, SamplerChain, SamplingParams
from quire.worker.platforms.base import Platform
from quire.worker.sampling import arithmetic
from quire.worker.sampling.chain import dry as dry_sampler
from quire.worker.sampling.chain.stages import PARAMETERS, STAGES, Candidates, Columns
from quire.worker.sampling.processors import LogitsProcessor, Penalties

_XTC_STREAM = 0x5DEECE66D  # mixed into a seed: another random stream than that of the tokens
# the parameters of stages that have other names; at its default, a stage does nothing
_PARAMETER_OF = {"typ_p": "typical_p", "xtc": "xtc_probability"}
_DEFAULTS = {one.name: one.default for kind in (SamplingParams, SamplerChain) for one in msgspec.structs.fields(kind)}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row's samplers that have an effect; rows of equal `stages` and `top_k` are computed together."""

    stages: tuple[str, ...]
    top_k: int
    values: tuple[float, ...]  # for `PARAMETERS`
    xtc_state: int
    mirostat_tau: float
    dry: Dry | None
    breakers: dry_sampler.Breakers | None


class SamplerChains(LogitsProcessor):
    """chain: run the samplers of a request in their order. It leaves finite logits to the tokens that may be sampled,
    with the temperature applied: random sampling draws from their softmax.

    Runs after all other processors, and so after masks, bias and penalties; penalties that a client puts later in the
    order are computed here.
    """

    def __init__(self, table: RequestTable, platform: Platform) -> None:
        super().__init__(table, platform)
        self._late = LatePenalties(table, platform)
        self._mu = torch.zeros(table.max_num_reqs, dtype=torch.float64, device=platform.device)
        self._new: dict[int, float] = {}  # rows that `_mu` does not have yet, and their first value
        self._drawn: list[tuple[list[int], torch.Tensor, Columns, Candidates]] = []

    def add(self, row: int, new: NewRequest) -> None:
        super().add(row, new)
        self._late.add(row, new)
        if (entry := self.rows.get(row)) is not None and entry.mirostat_tau:
            self._new[row] = 2 * entry.mirostat_tau

    def remove(self, row: int) -> None:
        super().remove(row)
        self._late.remove(row)
        self._new.pop(row, None)

    def read(self, sampling: SamplingParams) -> _Entry | None:
        chain = sampling.chain
        if chain is None:
            return None
        top_k = sampling.top_k if 0 < sampling.top_k < self.table.vocab_size else 0
        given = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
        values = tuple(float(given.get(name, getattr(chain, name, 0.0))) for name in PARAMETERS)
        breakers = chain.dry and dry_sampler.read_breakers(chain.dry, self.table.vocab_size, self.platform.device)
        return _Entry(
            tuple(name for name in _order(chain) if _has_effect(name, sampling, chain, top_k)),
            top_k,
            values,
            arithmetic.seed_state(sampling.seed ^ _XTC_STREAM),
            chain.mirostat_tau if chain.mirostat else 0.0,
            chain.dry,
            breakers,
        )

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        self._drawn = []
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for i, entry in self._using(batch):
            groups.setdefault((entry.stages, entry.top_k), []).append(i)
        for (stages, top_k), which in groups.items():
            index = self._send(which)
            candidates, columns = Candidates(logits[index]), self._columns(which, stages, batch)
            for stage in stages:
                if stage == "top_k":
                    candidates.sort(top_k)
                elif stage == "penalties":
                    self._late.change(candidates.restore(), which, batch)
                elif stage == "dry":
                    self._apply_dry(candidates.restore(), which, batch)
                else:
                    STAGES[stage](candidates, columns)
            logits[index] = candidates.restore()
            if columns.mu is not None:
                self._drawn.append((which, index, columns, candidates))

    def accept(self, token_ids: torch.Tensor, batch: SamplingBatch) -> None:
        """Update mirostat's state of the rows of the last `apply` by their tokens, `[S]` int64."""
        for which, index, columns, candidates in self._drawn:
            weights, total = candidates.weights()
            chosen = weights.gather(1, token_ids[index].clamp(min=0)[:, None])
            surprise = -(chosen.double() / total).clamp(min=2.0**-40).log2()
            mu = columns.mu - columns.mirostat_eta * (surprise - columns.mirostat_tau)
            self._mu[self._send([batch.rows[i] for i in which])] = mu.squeeze(1)
        self._drawn = []

    def _columns(self, which: list[int], stages: tuple[str, ...], batch: SamplingBatch) -> Columns:
        rows = [batch.rows[i] for i in which]
        entries: list[Any] = [self.rows[row] for row in rows]
        values = self.platform.to_device(np.array([entry.values for entry in entries], dtype=np.float64).T.copy())
        columns = Columns(*values[:, :, None])
        if "xtc" in stages:
            states = self._send([entry.xtc_state for entry in entries])
            columns.uniform = arithmetic.uniform(states, batch.positions_tensor[self._send(which)])[:, None]
        if stages and stages[-1].startswith("mirostat"):
            new = [row for row in rows if row in self._new]
            if new:
                first = np.array([self._new.pop(row) for row in new])
                self._mu[self._send(new)] = self.platform.to_device(first)
            columns.mu = self._mu[self._send(rows)][:, None]
        return columns

    def _apply_dry(self, logits: torch.Tensor, which: list[int], batch: SamplingBatch) -> None:
        for place, i in enumerate(which):
            row, position = batch.rows[i], batch.positions[i]
            entry = self.rows[row]
            first = max(position - entry.dry.last_n, 0) if entry.dry.last_n >= 0 else 0
            recent = self.table.token_table[row, first:position].long().flip(0)
            logits[place] -= dry_sampler.penalties(recent, entry.dry, entry.breakers, logits.shape[1])


class LatePenalties(Penalties):
    """Penalties of the rows whose order has another sampler before them."""

    def read(self, sampling: SamplingParams) -> Any:
        if sampling.chain is None or sampling.chain.mirostat or "penalties" not in sampling.chain.order[1:]:
            return None
        return self.values(sampling)

    def change(self, logits: torch.Tensor, which: list[int], batch: SamplingBatch) -> None:
        """Change logits `[n, V]` of the sampling rows `which`."""
        self.penalize(logits, [(place, i, self.rows[batch.rows[i]]) for place, i in enumerate(which)], batch)


def _order(chain: SamplerChain) -> tuple[str, ...]:
    return ("temperature", f"mirostat_{chain.mirostat}") if chain.mirostat else chain.order


def _has_effect(name: str, sampling: SamplingParams, chain: SamplerChain, top_k: int) -> bool:
    match name:
        case "penalties":
            return "penalties" in chain.order[1:] and Penalties.values(sampling) is not None
        case "dry":
            return chain.dry is not None and chain.dry.last_n != 0
        case "top_k":
            return bool(top_k)
        case "temperature" | "mirostat_1" | "mirostat_2":
            return True
    parameter = _PARAMETER_OF.get(name, name)
    owner = chain if hasattr(chain, parameter) else sampling
    return getattr(owner, parameter) != _DEFAULTS[parameter]
