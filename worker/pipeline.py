"""This rank's pipeline stage: the tensors it receives from the previous stage and those it sends to others.

Hidden states travel from stage to stage. The last stage samples and sends the token ids, and drafts, to the first
stage, the only one that embeds them; no other stage needs token ids. A stage waits as little as possible: a stage
starts the next step while its messages are still in transit.

W is the width of the tensors that travel between two stages: the hidden size, and more in some families.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import StepInput
from quire.worker.parallel import Group


class SingleStage:
    """The whole model on this rank (or on every rank of its tensor-parallel group): no communication between stages."""

    first = last = True

    def await_token_ids(self, step: StepInput, table: RequestTable) -> None:
        """Wait until `table` holds every token that `step` reads, and until no outstanding token can be written to a
        row that `step` reuses.
        """

    def receive_hidden(self, num_tokens: int) -> torch.Tensor | None:
        """Return the previous stage's result `[T, W]`, or None on the first stage."""
        return None

    def send_hidden(self, batch: InputBatch, hidden: torch.Tensor) -> None:
        """Send this stage's result `[T, W]` to the next stage; the tensor must not change afterwards. Not on the last
        stage.
        """
        raise AssertionError("a single stage has no next stage")

    def send_token_ids(self, token_ids: torch.Tensor) -> None:
        """Send the sampled ids `[S]` int64 to the first stage, for `RequestTable.append`. On the last stage only."""

    def send_drafts(self, drafts: list[list[int]]) -> None:
        """Send the drafts for the next step of each request that sampled, after its token ids. On the last
        stage only.
        """

    def drafts(self, step: StepInput) -> dict[int, list[int]]:
        """Return the drafts that `step` verifies by batch position: on the first stage, after `await_token_ids`."""
        raise AssertionError("a single stage makes its drafts")

    def send_to_last(self, flags: torch.Tensor) -> torch.Tensor:
        """Return the flags of the first stage on the last one, and `flags` on the others, before the hidden states of a
        step. All stages must call it.
        """
        return flags

    def finish(self, table: RequestTable) -> None:
        """Receive all outstanding token ids. Call it between runs over different tables."""


class PipelineStage(SingleStage):
    """One of several stages.

    `depth` is the maximum number of steps in flight: messages sent that many steps ago have arrived. The last stage
    sends up to `max_draft` drafts per request to the first one, where they are embedded.
    """

    def __init__(
        self, stages: Group, depth: int, width: int, dtype: torch.dtype, device: torch.device, max_draft: int = 0
    ) -> None:
        # token ids must not queue behind hidden states, which their receiver reads only after it has the ids
        self.stages, self.tokens = stages, stages.twin()
        self.first, self.last = stages.rank == 0, stages.rank == stages.size - 1
        self.depth, self.width, self.dtype, self.device = depth, width, dtype, device
        self.max_draft = max_draft
        self._drafts: dict[int, list[int]] = {}  # on the first stage: by row, for its next step
        # (send handle, tensor that must stay alive until the send completes)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._sent_flags: deque[tuple[Any, torch.Tensor]] = deque()  # the same for flags
        self._sent_drafts: deque[tuple[Any, torch.Tensor]] = deque()
        # on the first stage: steps whose token ids are outstanding, oldest first
        self._awaited: deque[InputBatch] = deque()

    def await_token_ids(self, step: StepInput, table: RequestTable) -> None:
        rows = set(step.rows)
        while self._awaited and (
            len(self._awaited) >= self.depth or any(not rows.isdisjoint(batch.sampling.rows) for batch in self._awaited)
        ):
            self._receive_token_ids(table)

    def receive_hidden(self, num_tokens: int) -> torch.Tensor | None:
        if self.first:
            return None
        return self.stages.receive(
            torch.empty(num_tokens, self.width, dtype=self.dtype, device=self.device), self.stages.rank - 1
        )

    def send_hidden(self, batch: InputBatch, hidden: torch.Tensor) -> None:
        self._send(self._sent, self.stages, hidden, self.stages.rank + 1)
        if self.first and batch.step.samples:
            self._awaited.append(batch)

    def send_token_ids(self, token_ids: torch.Tensor) -> None:
        self._send(self._sent, self.tokens, token_ids, 0)

    def send_drafts(self, drafts: list[list[int]]) -> None:
        if not self.max_draft or not drafts:
            return
        counted = np.zeros((len(drafts), 1 + self.max_draft), dtype=np.int64)
        for row, draft in zip(counted, drafts):
            row[: 1 + len(draft)] = [len(draft), *draft]
        self._send(self._sent_drafts, self.tokens, torch.from_numpy(counted).to(self.device), 0)

    def drafts(self, step: StepInput) -> dict[int, list[int]]:
        return {i: self._drafts[step.rows[i]][:count] for i, count in step.num_draft.items()}

    def send_to_last(self, flags: torch.Tensor) -> torch.Tensor:
        if self.first:
            self._send(self._sent_flags, self.stages, flags, self.stages.size - 1)
        return self.stages.receive(flags, 0) if self.last else flags

    def finish(self, table: RequestTable) -> None:
        while self._awaited:
            self._receive_token_ids(table)

    def _send(self, sent: deque[tuple[Any, torch.Tensor]], group: Group, tensor: torch.Tensor, to: int) -> None:
        tensor = tensor.contiguous()
        sent.append((group.send(tensor, to), tensor))
        if len(sent) > self.depth:
            sent.popleft()[0].wait()

    def _receive_token_ids(self, table: RequestTable) -> None:
        batch = self._awaited.popleft()
        token_ids = torch.empty(len(batch.sampling.rows), dtype=torch.int64, device=self.device)
        self.tokens.receive(token_ids, self.tokens.size - 1)
        table.append(batch.sampling.rows_tensor, batch.sampling.positions_tensor, token_ids, batch.max_seq_len)
        if self.max_draft:
            samples = batch.step.samples
            counted = torch.empty(len(samples), 1 + self.max_draft, dtype=torch.int64, device=self.device)
            self.tokens.receive(counted, self.tokens.size - 1)
            for i, (count, *draft) in zip(samples, counted.tolist()):
                self._drafts[batch.step.rows[i]] = draft[:count]


def pipeline_stage(
    stages: Group, depth: int, width: int, dtype: torch.dtype, device: torch.device, max_draft: int = 0
) -> SingleStage:
    """Return this rank's stage, which receives `width` entries per token. All ranks of `stages` call it together."""
    return SingleStage() if stages.size == 1 else PipelineStage(stages, depth, width, dtype, device, max_draft)
