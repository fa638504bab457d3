"""This rank's place among the pipeline's stages: what it gets from the stage before, and what it owes the others.

Hidden states go from stage to stage; the last stage samples, and sends the ids to the first, which alone embeds them.
No other stage needs to know a token. Nothing here waits longer than it must: a stage goes on with the next step while
what it sent is still on its way.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import StepInput
from quire.worker.parallel import Group


class SingleStage:
    """The whole model on this rank (or on every rank of its tensor-parallel group): nothing to send or to wait for."""

    first = last = True

    def await_token_ids(self, step: StepInput, table: RequestTable) -> None:
        """See that `table` holds every token that `step` reads, and that no token which is still to come falls upon
        another request.
        """

    def receive_hidden(self, num_tokens: int) -> torch.Tensor | None:
        """The previous stage's result `[T, H]`; None on the first stage."""
        return None

    def send_hidden(self, batch: InputBatch, hidden: torch.Tensor) -> None:
        """Hand this stage's result `[T, H]` on, which must not change any more. Not on the last stage."""
        raise AssertionError("the only stage has no next")

    def send_token_ids(self, token_ids: torch.Tensor) -> None:
        """Tell the first stage what was sampled, `[S]` int64, as `RequestTable.append` takes it. On the last stage."""

    def finish(self, table: RequestTable) -> None:
        """Receive what is still owed to this stage. Between runs over different tables."""


class PipelineStage(SingleStage):
    """One of several stages.

    `depth` is how many steps may be in flight: what was sent that many steps ago has arrived.
    """

    def __init__(self, stages: Group, depth: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        # ids must not queue behind hidden states that nobody reads before it has the ids
        self.stages, self.tokens = stages, stages.twin()
        self.first, self.last = stages.rank == 0, stages.rank == stages.size - 1
        self.depth, self.hidden_size, self.dtype, self.device = depth, hidden_size, dtype, device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # (its end, what must stay alive until then)
        self._awaited: deque[InputBatch] = deque()  # on the first stage: steps whose ids are to come, the oldest first

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
            torch.empty(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device), self.stages.rank - 1
        )

    def send_hidden(self, batch: InputBatch, hidden: torch.Tensor) -> None:
        self._send(self.stages, hidden, self.stages.rank + 1)
        if self.first and batch.step.samples:
            self._awaited.append(batch)

    def send_token_ids(self, token_ids: torch.Tensor) -> None:
        self._send(self.tokens, token_ids, 0)

    def finish(self, table: RequestTable) -> None:
        while self._awaited:
            self._receive_token_ids(table)

    def _send(self, group: Group, tensor: torch.Tensor, to: int) -> None:
        tensor = tensor.contiguous()
        self._sent.append((group.send(tensor, to), tensor))
        if len(self._sent) > self.depth:
            self._sent.popleft()[0].wait()

    def _receive_token_ids(self, table: RequestTable) -> None:
        batch = self._awaited.popleft()
        token_ids = torch.empty(len(batch.sampling.rows), dtype=torch.int64, device=self.device)
        self.tokens.receive(token_ids, self.tokens.size - 1)
        table.append(batch.sampling.rows_tensor, batch.sampling.positions_tensor, token_ids, batch.attn[0].max_seq_len)


def pipeline_stage(
    stages: Group, depth: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> SingleStage:
    """What stands for this rank's place. All ranks of `stages` call it together."""
    return SingleStage() if stages.size == 1 else PipelineStage(stages, depth, hidden_size, dtype, device)
