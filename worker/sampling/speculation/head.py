"""Drafts of heads that read hidden states of the model: the prediction heads (MTP) of its checkpoint, or an EAGLE-3
head.

Their keys and values are in the blocks of the model's own cache group for all tokens, as those of a draft model are, or
in a group of their own if they attend to a window. At position p those of head i are made of a hidden state of token p
and the embedding of token p + i + 1, so that they are computed when both are known: for the first head after the step
that computes token p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from quire.worker.attention.base import AttentionBackend, GroupedMetadata
from quire.worker.batch.input_batch import InputBatch, InputBuffers, SamplingBatch, prepare_inputs
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import StepInput
from quire.worker.platforms.base import Platform
from quire.worker.platforms.ops import Ops
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.speculation.drafter import relative_size
from quire.worker.transformer.decoder import CausalLM

if TYPE_CHECKING:
    from quire.worker.models.eagle3 import LlamaEagle3


class Head(Protocol):
    def predict(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        depth: int = 0,
    ) -> torch.Tensor:
        """Map hidden states `[T, H]` of tokens at `positions`, and the tokens `[T]` that follow them by `depth` + 1
        places, to hidden states of head `depth`, from which `draft_logits` and, one token later, `predict` go on.
        """

    def draft_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Return logits `[S, vocab_size]` of the tokens one place further, of hidden states of head `depth`."""


@dataclass(frozen=True, slots=True)
class Results:
    """Hidden states `[n, H]` of a head for the tokens of a request from position `first` on."""

    first: int
    hidden: torch.Tensor

    @property
    def end(self) -> int:
        return self.first + len(self.hidden)

    def between(self, start: int, end: int) -> torch.Tensor:
        return self.hidden[start - self.first : end - self.first]

    def followed_by(self, later: Results) -> Results:
        """Return these results up to the first of `later`, then `later`; only `later` if it starts outside them."""
        if not self.first <= later.first <= self.end:
            return later
        return Results(self.first, torch.cat([self.between(self.first, later.first), later.hidden]))

    def last(self, count: int) -> Results:
        """Return a copy of the last `count` results."""
        start = max(self.first, self.end - count)
        return Results(start, self.between(start, self.end).clone())


class HeadDrafter:
    """A `ModelDrafter`: draft i follows from head i, which reads the hidden states of head i - 1 and the tokens i + 1
    places further; the last head goes on with its own hidden states, one position further for each draft.

    Head i > 0 can process a token later than head 0: only once i more tokens are known.
    """

    def __init__(
        self,
        model: CausalLM,
        eagle: LlamaEagle3 | None,
        table: RequestTable,
        backend: AttentionBackend,
        platform: Platform,
        max_num_tokens: int,
        sampler: Sampler,
    ) -> None:
        """Draft for `model` with `eagle` or, without it, with the heads of `model` itself."""
        self.model, self.table, self.backend, self.platform, self.sampler = model, table, backend, platform, sampler
        self.eagle, self.needs_hidden = eagle, eagle is None
        self.head: Head = eagle or model
        self.depths = 1 if eagle is not None else len(model.mtp)
        self.cost = relative_size([eagle] if eagle is not None else [model.mtp[0], model.lm_head], model)
        self.buffers = InputBuffers(
            table.max_num_reqs, max_num_tokens, table.max_blocks, platform.device, len(table.groups)
        )
        self.results: list[dict[int, Results]] = [{} for _ in range(self.depths)]  # of each head: row -> its last ones

    def use(self, ops: Ops, backend: AttentionBackend) -> None:
        """Switch to a platform's operations; those of a prediction head are the model's."""
        self.backend = backend
        if self.eagle is not None:
            self.eagle.use(ops)
            self.eagle.finalize()

    def draft(self, step: StepInput, counts: dict[int, int]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {i: [] for i in counts}
        known = {i: step.num_computed[i] + step.num_scheduled[i] - step.num_draft[i] for i in counts}
        made = {i: self._kept(0, step.rows[i], known[i] - 2, known[i] - 1) for i in counts}
        for place in range(max(counts.values(), default=0)):
            mine = [i for i in counts if counts[i] > place]
            if 0 < place < self.depths:
                made = self._deeper(place, step, known, {i: made[i] for i in mine}, drafts)
            elif place:
                further = place - self.depths + 1
                made = self._further(step, {i: known[i] - 2 + further for i in mine}, made, drafts)
            rows, positions = [step.rows[i] for i in mine], [known[i] + place for i in mine]
            last = torch.stack([made[i].hidden[-1] for i in mine])
            token_ids = self._choose(last, min(place, self.depths - 1), rows, positions)
            for i, token_id in zip(mine, token_ids):
                drafts[i].append(token_id)
            self.table.write_drafts(rows, positions, token_ids)
        return drafts

    def _kept(self, depth: int, row: int, start: int, end: int) -> Results:
        """Return the results of head `depth` at positions from `start`, or the first that are known, to `end`."""
        kept = self.results[depth][row]
        start = max(start, kept.first)
        return Results(start, kept.between(start, end))

    def _deeper(
        self,
        depth: int,
        step: StepInput,
        known: dict[int, int],
        made: dict[int, Results],
        drafts: dict[int, list[int]],
    ) -> dict[int, Results]:
        """Return the results of head `depth` for the tokens whose successor at distance `depth` + 1 is a draft, from
        the previous head's results; `made` are its results for drafts.
        """
        inputs = {}
        for i, later in made.items():
            start = known[i] - 1 - depth
            before = self.results[depth - 1].get(step.rows[i], later)
            found = depth > 1 and before.first <= start < later.first <= before.end
            inputs[i] = Results(start, before.between(start, later.first)).followed_by(later) if found else later
        ids = [drafts[i][one.first + depth + 1 - known[i] :] for i, one in inputs.items()]
        following = self.platform.to_device(np.array([one for some in ids for one in some]))
        return self._predict(depth, step, inputs, following)

    def _further(
        self, step: StepInput, positions: dict[int, int], made: dict[int, Results], drafts: dict[int, list[int]]
    ) -> dict[int, Results]:
        """Return the results of the last head at `positions`, from its own before."""
        inputs = {i: Results(position, made[i].hidden[-1:]) for i, position in positions.items()}
        following = self.platform.to_device(np.array([drafts[i][-1] for i in positions]))
        return self._predict(self.depths - 1, step, inputs, following)

    def _predict(
        self, depth: int, step: StepInput, inputs: dict[int, Results], following: torch.Tensor
    ) -> dict[int, Results]:
        """Return the results of head `depth` for `inputs` of batch positions, whose tokens precede `following`.
        """
        firsts, counts = [one.first for one in inputs.values()], [len(one.hidden) for one in inputs.values()]
        rows = [step.rows[i] for i in inputs]
        one = StepInput(step.step, [], rows, firsts, counts, [[] for _ in rows], list(range(len(rows))))
        batch = prepare_inputs(one, self.table, self.buffers, self.platform, self.backend)
        for meta in batch.attn:
            meta.backend.build(meta)
        hidden = torch.cat([one.hidden for one in inputs.values()])
        parts = self.head.predict(following, hidden, batch.positions, batch.attn, depth).split(counts)
        return {i: Results(first, part) for i, first, part in zip(inputs, firsts, parts)}

    def _choose(self, hidden: torch.Tensor, depth: int, rows: list[int], positions: list[int]) -> list[int]:
        sent = self.platform.to_device(np.array([rows, positions, range(len(rows))], dtype=np.int64))
        batch = SamplingBatch(rows, positions, *sent)
        return self.sampler.choose(self.head.draft_logits(hidden, depth), batch).clamp_min(0).tolist()

    def follow(self, batch: InputBatch, hidden: torch.Tensor, drafted: dict[int, int]) -> None:
        step, starts = batch.step, batch.query_start_loc
        if self.eagle is not None:
            hidden = self.eagle.combined([kept[: len(batch.input_ids)] for kept in self.model.model.captured])
        else:
            hidden = self.model.read_by_heads(hidden)
        for meta in batch.attn:
            if meta.extra is None:  # the step replayed a recording, which has its own
                meta.backend.build(meta)
        spans = [(row, s, s + n) for row, s, n in zip(step.rows, step.num_computed, step.num_scheduled)]
        found = self.head.predict(self._following(spans, 1), hidden, batch.positions, batch.attn)
        for new in step.new:
            for kept in self.results:
                kept.pop(new.row, None)
        whole = {i: Results(first, found[starts[i] : starts[i + 1]]) for i, (_, first, _) in enumerate(spans)}
        whole = self._keep(0, step, whole)
        for depth in range(1, self.depths):
            inputs = {}
            for i, (_, start, end) in enumerate(spans):
                first, stop = max(start - depth, whole[i].first if i in whole else end), end - depth
                if first < stop:
                    inputs[i] = Results(first, whole[i].between(first, stop))
            if not inputs:
                return
            places = [(step.rows[i], one.first, one.end) for i, one in inputs.items()]
            made = self._predict(depth, step, inputs, self._following(places, depth + 1))
            whole = self._keep(depth, step, made)

    def _following(self, spans: list[tuple[int, int, int]], distance: int) -> torch.Tensor:
        """Return the tokens `distance` places after those of `spans`, (row, first position, end) each."""
        rows = np.repeat([row for row, _, _ in spans], [end - first for _, first, end in spans])
        places = np.concatenate([np.arange(first, end) for _, first, end in spans]) + distance
        sent = self.platform.to_device(np.stack([rows, np.minimum(places, self.table.max_model_len - 1)]))
        return self.table.token_table[sent[0], sent[1]]

    def _keep(self, depth: int, step: StepInput, made: dict[int, Results]) -> dict[int, Results]:
        """Keep the last results of head `depth` of each request. Returns all of them, with those before."""
        kept, sampled = self.results[depth], set(step.samples)
        for i, results in made.items():
            row = step.rows[i]
            if self.depths > 1 and row in kept:
                made[i] = results = kept[row].followed_by(results)
            if i in sampled or self.depths > 1:
                kept[row] = results.last(step.num_draft.get(i, 0) + self.depths)
        return made
