"""Drafts of a head that reads hidden states of the model: the prediction head (MTP) of its checkpoint, or an EAGLE-3
head.

The head's keys and values lie in the blocks of the model's own cache group for all tokens, as those of a draft model
do. At position p they are those of the hidden state of token p and the embedding of token p + 1, so that they are
computed when both are known: after the step that computes token p.
"""

from __future__ import annotations

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
        self, next_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attn: GroupedMetadata
    ) -> torch.Tensor:
        """Map hidden states `[T, H]` of tokens at `positions`, and the tokens `[T]` that follow them, to hidden states
        of the head, from which `logits` and, one token later, `predict` go on.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[S, vocab_size]` of the tokens after the next ones, of hidden states of the head."""


class HeadDrafter:
    """A `ModelDrafter`: the first draft follows from the head's result of the step before, the next ones from the head
    itself, with its own hidden states in place of the model's.
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
        """`eagle` drafts for `model`; without it, the head of `model` itself."""
        self.model, self.table, self.backend, self.platform, self.sampler = model, table, backend, platform, sampler
        self.eagle, self.needs_hidden = eagle, eagle is None
        self.head: Head = eagle or model
        self.cost = relative_size([eagle] if eagle is not None else [model.mtp, model.lm_head], model)
        self.buffers = InputBuffers(
            table.max_num_reqs, max_num_tokens, table.max_blocks, platform.device, len(table.groups)
        )
        # row -> (position of the first token, the head's results for it and those after it) of the last step
        self.results: dict[int, tuple[int, torch.Tensor]] = {}

    def use(self, ops: Ops, backend: AttentionBackend) -> None:
        """Switch to a platform's operations; those of a prediction head are the model's."""
        self.backend = backend
        if self.eagle is not None:
            self.eagle.use(ops)
            self.eagle.finalize()

    def draft(self, step: StepInput, counts: dict[int, int]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {i: [] for i in counts}
        known = {i: step.num_computed[i] + step.num_scheduled[i] - step.num_draft[i] for i in counts}
        mine = list(counts)
        hidden = torch.stack([self._result(step.rows[i], known[i] - 2) for i in mine])
        for place in range(max(counts.values(), default=0)):
            if place:
                kept = [k for k, i in enumerate(mine) if counts[i] > place]
                mine = [mine[k] for k in kept]
                ids, hidden = self.platform.to_device(np.array([drafts[i][-1] for i in mine])), hidden[kept]
                hidden = self._next(step, mine, [known[i] - 2 + place for i in mine], ids, hidden)
            rows, positions = [step.rows[i] for i in mine], [known[i] + place for i in mine]
            token_ids = self._choose(hidden, rows, positions)
            for i, token_id in zip(mine, token_ids):
                drafts[i].append(token_id)
            self.table.write_drafts(rows, positions, token_ids)
        return drafts

    def _result(self, row: int, position: int) -> torch.Tensor:
        first, results = self.results[row]
        return results[position - first]

    def _next(
        self, step: StepInput, mine: list[int], positions: list[int], ids: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the head's results `[R, H]` for tokens at `positions`, which `ids` follow."""
        rows = [step.rows[i] for i in mine]
        one = StepInput(step.step, [], rows, positions, [1] * len(rows), [[] for _ in rows], list(range(len(rows))))
        batch = prepare_inputs(one, self.table, self.buffers, self.platform, self.backend)
        for meta in batch.attn:
            meta.backend.build(meta)
        return self.head.predict(ids, hidden, batch.positions, batch.attn)

    def _choose(self, hidden: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
        sent = self.platform.to_device(np.array([rows, positions, range(len(rows))], dtype=np.int64))
        batch = SamplingBatch(rows, positions, *sent)
        return self.sampler.choose(self.head.logits(hidden), batch).clamp_min(0).tolist()

    def follow(self, batch: InputBatch, hidden: torch.Tensor, drafted: dict[int, int]) -> None:
        step = batch.step
        rows = np.repeat(step.rows, step.num_scheduled)
        following = np.concatenate([np.arange(s, s + n) for s, n in zip(step.num_computed, step.num_scheduled)]) + 1
        sent = self.platform.to_device(np.stack([rows, np.minimum(following, self.table.max_model_len - 1)]))
        if self.eagle is not None:
            hidden = self.eagle.combined([kept[: len(batch.input_ids)] for kept in self.model.model.captured])
        for meta in batch.attn:
            if meta.extra is None:  # the step replayed a recording, which has its own
                meta.backend.build(meta)
        results = self.head.predict(self.table.token_table[sent[0], sent[1]], hidden, batch.positions, batch.attn)
        for i in step.samples:
            count, end = 1 + step.num_draft.get(i, 0), batch.query_start_loc[i + 1]
            first = step.num_computed[i] + step.num_scheduled[i] - count
            self.results[step.rows[i]] = first, results[end - count : end].clone()
