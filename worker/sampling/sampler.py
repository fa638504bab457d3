"""Sample one token per sampling row from logits, and compute its log-probabilities.

Features that no row of a step uses cost nothing: a greedy step is two reductions. The host knows which rows use which
feature, so it never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import NewRequest, TokenLogprobs
from quire.worker.platforms.base import Platform
from quire.worker.sampling import arithmetic as sampling_math
from quire.worker.sampling.arithmetic import RandomRows
from quire.worker.sampling.chain.rows import SamplerChains
from quire.worker.sampling.grammar import GrammarRows
from quire.worker.sampling.logprobs import Entries, entries, is_normalized
from quire.worker.sampling.ngrams import RepeatedNgrams
from quire.worker.sampling.processors import logits_processors
from quire.worker.sampling.speech import SpeechTokens
from quire.worker.sampling.thinking import EndOfThinking

_MIN_TEMPERATURE = 1e-5  # below this the softmax has a single token: sample greedily
_LOGPROBS_ELEMENTS = 1 << 24  # logits whose log-probabilities are computed at once; that takes a few copies of them


@dataclass(slots=True)
class RowLogprobs:
    """Log-probabilities that some sampling rows requested, being copied to the host."""

    which: list[int]  # indices of the sampling rows
    counts: list[int]
    entries: Entries

    def messages(self) -> dict[int, list[TokenLogprobs]]:
        """Return messages by index of the sampling row."""
        return {i: [message] for i, message in zip(self.which, self.entries.messages(self.counts))}


@dataclass(slots=True)
class Sampled:
    """`token_ids` `[S]` int64 on the device; -1 if a row's logits are not finite or exclude every token."""

    token_ids: torch.Tensor
    logprobs: list[RowLogprobs]
    errors: dict[int, str] = field(default_factory=dict)  # by sampling row
    appended: bool = False  # whether the token table has them


class SamplingRows:
    """A `RowState`: the parameters of random sampling, on the host. Each step copies its rows to the device."""

    def __init__(self, max_num_reqs: int, vocab_size: int, platform: Platform) -> None:
        self.vocab_size, self.platform = vocab_size, platform
        self.random: set[int] = set()
        self.top_k: dict[int, int] = {}  # rows with a filter, a subset of `random`
        self.top_p: set[int] = set()
        self.min_p: set[int] = set()
        # temperature (0 for greedy rows), top_p, min_p
        self.floats = torch.zeros(3, max_num_reqs, dtype=torch.float64)
        self.ints = torch.zeros(2, max_num_reqs, dtype=torch.int64)  # top_k or 0, state of the seed
        self._floats, self._ints = self.floats.numpy(), self.ints.numpy()  # the same memory
        self._tables: tuple[torch.Tensor, ...] | None = None  # result of `tables`; None when out of date

    def add(self, row: int, new: NewRequest) -> None:
        sampling = new.sampling
        if sampling.temperature < _MIN_TEMPERATURE:
            return
        self.random.add(row)
        if sampling.chain is not None:  # it has applied the temperature and all filters
            self._set(row, 1.0, 1.0, 0.0, 0, sampling.seed)
            return
        top_k = sampling.top_k if 0 < sampling.top_k < self.vocab_size else 0
        if top_k:
            self.top_k[row] = top_k
        if sampling.top_p < 1:
            self.top_p.add(row)
        if sampling.min_p > 0:
            self.min_p.add(row)
        self._set(row, sampling.temperature, sampling.top_p, sampling.min_p, top_k, sampling.seed)

    def _set(self, row: int, temperature: float, top_p: float, min_p: float, top_k: int, seed: int) -> None:
        self._floats[:, row] = temperature, top_p, min_p
        self._ints[:, row] = top_k, sampling_math.seed_state(seed)
        self._tables = None

    def remove(self, row: int) -> None:
        if row in self.random:
            self.random.remove(row)
            self._floats[0, row] = 0
            self._tables = None
        self.top_k.pop(row, None)
        self.top_p.discard(row)
        self.min_p.discard(row)

    def any_filter(self, rows: list[int]) -> bool:
        """Return whether one of `rows` has a top_k, top_p or min_p."""
        filtering = self.top_k.keys(), self.top_p, self.min_p
        return any(some and not some.isdisjoint(rows) for some in filtering)

    def tables(self) -> tuple[torch.Tensor, ...]:
        """Return the inputs of the fused sampler, each `[max_num_reqs]` on the device: temperature float32, 0 for
        greedy rows; the seed's state int64; top_k int64, 0 for off; top_p float64, 1 for off; min_p float32. Copied
        only after a change.
        """
        if self._tables is None:
            sent = self.platform.to_device(np.concatenate([self._floats.view(np.int64), self._ints]))
            temperature, top_p, min_p = sent[:3].view(torch.float64)
            self._tables = temperature.float(), sent[4], sent[3], top_p, min_p.float()
        return self._tables

    def gather(self, rows: list[int], positions: torch.Tensor) -> RandomRows:
        """Return the parameters of `rows` (all random), which sample at `positions` `[S]`."""
        temperature, top_p, min_p = self.platform.to_device(self._floats[:, rows])
        top_k, state = self.platform.to_device(self._ints[:, rows])
        ks = [self.top_k.get(row, 0) for row in rows]
        return RandomRows(
            temperature.float(),
            top_p,
            min_p.float(),
            top_k,
            sampling_math.uniform(state, positions),
            max(ks),
            min(ks) > 0,
            not self.top_p.isdisjoint(rows),
            self.top_p.issuperset(rows),
            not self.min_p.isdisjoint(rows),
        )


class Sampler:
    """Owns the row states that sampling reads and registers them with the request table."""

    def __init__(self, table: RequestTable, platform: Platform) -> None:
        self.table, self.platform = table, platform
        self.params = SamplingRows(table.max_num_reqs, table.vocab_size, platform)
        self.chains = SamplerChains(table, platform)
        self.processors = [
            *logits_processors(table, platform),
            RepeatedNgrams(table, platform),
            EndOfThinking(table, platform),
            SpeechTokens(table, platform),
            self.chains,
        ]
        self.logprobs = LogprobRows(table.vocab_size)
        self.grammars = GrammarRows(table, platform)
        for state in (self.params, *self.processors, self.logprobs, self.grammars):
            table.register(state)
        self.fused = platform.ops.fused_sample
        self._elements = platform.sampled_at_once

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """Sample one token for each row of logits `[S, V]` float32 (or of 16 bits, if `takes_rounded`); overwrites the
        logits.
        """
        # before log-probabilities are copied: as in vLLM, they are those of the tokens that the grammar allows
        masks = self.grammars.apply(logits, batch)
        requested = self.logprobs.requested(batch)
        active = [processor for processor in self.processors if processor.needed(batch)]
        raw = (
            {key: self._copy(logits, which, batch) for key, which in requested.items() if not key[0]} if active else {}
        )
        for processor in active:
            processor.apply(logits, batch)
        masks.end(logits)
        token_ids = self.choose(logits, batch, self.table.token_table)
        self.chains.accept(token_ids, batch)
        size = max(1, _LOGPROBS_ELEMENTS // logits.shape[1])
        logprobs = []
        for key, which in requested.items():
            for part in (slice(i, i + size) for i in range(0, len(which), size)):
                copies = raw[key][part] if key in raw else None
                logprobs.append(self._row_logprobs(key, which[part], copies, logits, token_ids, batch))
        return Sampled(token_ids, logprobs, masks.errors, self.fused is not None)

    def only_argmax(self, batch: SamplingBatch) -> bool:
        """Return whether the step needs only the argmax of each row."""
        return self.params.random.isdisjoint(batch.rows) and self._only_tokens(batch)

    def takes_rounded(self, batch: SamplingBatch) -> bool:
        """Return whether `sample` may get the step's logits in 16 bits: nothing computes with them but the kernel that
        samples, which would convert the same numbers from float32.
        """
        return self.fused is not None and self._only_tokens(batch)

    def _only_tokens(self, batch: SamplingBatch) -> bool:
        """Return whether the logits of a step stay unchanged and no request wants log-probabilities."""
        return (
            not self.logprobs.requested(batch)
            and not any(processor.needed(batch) for processor in self.processors)
            and not self.grammars.needed(batch)
        )

    def choose(self, logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the token of each row of processed logits, int64 `[S]`; -1 if none is possible. The fused sampler
        stores it in the token table `tokens`, too, if given.
        """
        params, rows = self.params, batch.rows
        native = self.platform.ops.sample(logits, batch.rows_tensor, batch.positions_tensor, params.floats, params.ints)
        if native is not None:
            return native
        if self.fused:
            tables = params.tables() if params.any_filter(rows) else params.tables()[:2]
            return self.fused(logits, batch.rows_tensor, batch.positions_tensor, *tables, tokens=tokens)[1]
        if not params.random or params.random.isdisjoint(rows):
            values, token_ids = sampling_math.best(logits)
            return torch.where(values.isfinite(), token_ids, -1)
        values, token_ids = logits.new_empty(len(rows)), logits.new_empty(len(rows), dtype=torch.int64)
        # batch indices by (random, has top_k, has top_p): each group takes its cheapest path
        groups: dict[tuple[bool, bool, bool], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((row in params.random, row in params.top_k, row in params.top_p), []).append(i)
        for (random, *_), which in groups.items():
            where = self._indices(which, batch)
            if random:
                values[where], token_ids[where] = self._pick(
                    logits[where], params.gather([rows[i] for i in which], batch.positions_tensor[where])
                )
            else:
                values[where], token_ids[where] = sampling_math.best(logits[where])
        return torch.where(values.isfinite(), token_ids, -1)

    def _indices(self, which: list[int], batch: SamplingBatch) -> torch.Tensor | slice:
        """Return `which` as an index into the batch's tensors."""
        return (
            slice(None) if len(which) == len(batch.rows) else self.platform.to_device(np.array(which, dtype=np.int64))
        )

    def _copy(self, logits: torch.Tensor, which: list[int], batch: SamplingBatch) -> torch.Tensor:
        where = self._indices(which, batch)
        return logits.clone() if isinstance(where, slice) else logits[where]

    def _pick(self, logits: torch.Tensor, rows: RandomRows) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(1, self._elements // logits.shape[1])
        if rows.all_top_k:
            size *= 8  # only a small part of each row is searched
        if len(logits) <= size:
            return sampling_math.pick(logits, rows)
        parts = [
            sampling_math.pick(logits[i : i + size], rows.select(slice(i, i + size)))
            for i in range(0, len(logits), size)
        ]
        values, token_ids = zip(*parts)
        return torch.cat(values), torch.cat(token_ids)

    def _row_logprobs(
        self,
        key: tuple[bool, bool],
        which: list[int],
        raw: torch.Tensor | None,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        batch: SamplingBatch,
    ) -> RowLogprobs:
        processed, normalize = key
        where = self._indices(which, batch)
        if raw is None:
            raw = logits[where]
        if processed:
            raw = self._filtered(raw, [batch.rows[i] for i in which], batch.positions_tensor[where])
        counts = [self.logprobs.rows[batch.rows[i]][0] for i in which]
        return RowLogprobs(which, counts, entries(raw, token_ids[where], max(counts), normalize, self.platform))

    def _filtered(self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor) -> torch.Tensor:
        """Return logits after temperature and filters in the random rows among `rows`.

        Greedy rows have neither.
        """
        random = [i for i, row in enumerate(rows) if row in self.params.random]
        if not random:
            return logits
        where = self.platform.to_device(np.array(random, dtype=np.int64))
        logits = logits.clone()
        logits[where] = sampling_math.filtered(
            logits[where], self.params.gather([rows[i] for i in random], positions[where])
        )
        return logits


class LogprobRows:
    """A `RowState`: the rows that requested log-probabilities of their sampled tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # row -> (number of best tokens, (from processed logits, normalized))
        self.rows: dict[int, tuple[int, tuple[bool, bool]]] = {}

    def add(self, row: int, new: NewRequest) -> None:
        num, mode = new.sampling.logprobs, new.sampling.logprobs_mode
        if num is not None:
            self.rows[row] = (
                self.vocab_size if num < 0 else min(num, self.vocab_size),
                (mode.startswith("processed"), is_normalized(mode)),
            )

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def requested(self, batch: SamplingBatch) -> dict[tuple[bool, bool], list[int]]:
        """Return batch indices of the rows that requested log-probabilities, by (processed, normalized)."""
        requested: dict[tuple[bool, bool], list[int]] = {}
        if self.rows:
            for i, row in enumerate(batch.rows):
                if row in self.rows:
                    requested.setdefault(self.rows[row][1], []).append(i)
        return requested
