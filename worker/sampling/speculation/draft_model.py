"""Drafts of a second, small model with the same vocabulary.

Its keys and values lie in the blocks of the model's own cache group for all tokens (`spec/cache.py`, `add_drafting`),
so that chunks, shared prefixes and preemption need no special case: `follow` computes every token of a step that
the model computes, unless drafting did so before.
"""

from __future__ import annotations

import torch

from quire.worker.attention.base import AttentionBackend
from quire.worker.batch.input_batch import InputBatch, InputBuffers, prepare_inputs
from quire.worker.batch.request_table import RequestTable
from quire.worker.cache.allocation import attention_layers
from quire.worker.messages import StepInput
from quire.worker.platforms.base import Platform
from quire.worker.platforms.ops import Ops
from quire.worker.sampling.sampler import Sampler
from quire.worker.sampling.speculation.drafter import relative_size
from quire.worker.transformer.decoder import CausalLM


def place_after(model: CausalLM, num_layers: int) -> None:
    """Let the caches of a draft model's layers follow those of the `num_layers` layers of the model."""
    for layer in attention_layers(model):
        layer.layer_index += num_layers
        layer.kv_from = None if layer.kv_from is None else layer.kv_from + num_layers


class DraftModel:
    """A `ModelDrafter` that runs the draft model over the request table of the model that it drafts for."""

    needs_hidden = False

    def __init__(
        self,
        model: CausalLM,
        table: RequestTable,
        backend: AttentionBackend,
        platform: Platform,
        max_num_tokens: int,
        sampler: Sampler,
        target: CausalLM,
    ) -> None:
        self.model, self.table, self.backend, self.platform, self.sampler = model, table, backend, platform, sampler
        self.cost = relative_size([model], target)
        self.buffers = InputBuffers(
            table.max_num_reqs, max_num_tokens, table.max_blocks, platform.device, len(table.groups)
        )

    def use(self, ops: Ops, backend: AttentionBackend) -> None:
        """Switch to a platform's operations."""
        self.model.use(ops)
        self.model.finalize()
        self.backend = backend

    def draft(self, step: StepInput, counts: dict[int, int]) -> dict[int, list[int]]:
        """Return `counts[i]` likely next tokens of the requests at batch positions i of `step`, whose tables are up to
        date.

        Each is sampled at its position from the draft model's logits: at a temperature, too, both models
        choose by the same random number. The drafts are written to the token table.
        """
        drafts: dict[int, list[int]] = {i: [] for i in counts}
        known = {i: step.num_computed[i] + step.num_scheduled[i] - step.num_draft[i] for i in counts}
        for place in range(max(counts.values(), default=0)):
            mine = [i for i in counts if counts[i] > place]
            rows = [step.rows[i] for i in mine]
            batch = self._batch(step.step, rows, [known[i] - 1 + place for i in mine], [1] * len(mine))
            token_ids = self.sampler.choose(self.model.logits(self._run(batch)), batch.sampling).clamp_min(0).tolist()
            for i, token_id in zip(mine, token_ids):
                drafts[i].append(token_id)
            self.table.write_drafts(rows, [known[i] + place for i in mine], token_ids)
        return drafts

    def follow(self, batch: InputBatch, hidden: torch.Tensor, drafted: dict[int, int]) -> None:
        """Compute keys and values of the tokens of a step, without those that were computed while `drafted[i]` tokens
        were drafted. Requests without drafts are no exception: others may share their blocks.
        """
        step = batch.step
        computed = [start + drafted.get(i, 0) for i, start in enumerate(step.num_computed)]
        counts = [count - drafted.get(i, 0) for i, count in enumerate(step.num_scheduled)]
        self._run(self._batch(step.step, step.rows, computed, counts), self.buffers.arange[:1])

    def _batch(self, number: int, rows: list[int], computed: list[int], counts: list[int]) -> InputBatch:
        step = StepInput(number, [], rows, computed, counts, [[] for _ in rows], list(range(len(rows))))
        return prepare_inputs(step, self.table, self.buffers, self.platform, self.backend)

    def _run(self, batch: InputBatch, needed_rows: torch.Tensor | None = None) -> torch.Tensor:
        for meta in batch.attn:
            meta.backend.build(meta)
        return self.model(batch.input_ids, batch.positions, batch.attn, None, needed_rows)
