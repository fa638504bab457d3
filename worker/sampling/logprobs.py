"""Log-probabilities of sampled and of prompt tokens: computed on the device, sent to the host, made into messages
there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.worker.batch.input_batch import InputBatch
from quire.worker.batch.request_table import RequestTable
from quire.worker.messages import LOGPROBS_MODES, NewRequest, StepInput, TokenLogprobs
from quire.worker.platforms.base import Platform
from quire.worker.sampling.arithmetic import largest

_CHUNK_ROWS, _CHUNK_ELEMENTS = 256, 1 << 24  # of prompt logits at once


@dataclass(slots=True)
class Entries:
    """n positions on their way to the host: the token there and the most likely ones.

    Read it when the step's event has passed.
    """

    token_ids: torch.Tensor  # [n, 1 + k]
    values: torch.Tensor  # [n, 1 + k] float32
    ranks: torch.Tensor  # [n]

    def messages(self, counts: list[int]) -> list[TokenLogprobs]:
        """One message per position, with `counts[i]` tokens besides the one there."""
        token_ids, values = self.token_ids.tolist(), self.values.tolist()
        return [
            TokenLogprobs(t[: 1 + n], v[: 1 + n], rank)
            for t, v, rank, n in zip(token_ids, values, self.ranks.tolist(), counts)
        ]


def entries(logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalize: bool, platform: Platform) -> Entries:
    """For each row of logits `[n, V]` float32 the value of `token_ids[i]`, of the `num` best tokens, and the former's
    rank.

    Values are log-probabilities, or the logits themselves without `normalize`.
    """
    if (native := platform.ops.logprobs(logits, token_ids.long(), num, normalize)) is not None:
        return Entries(*native)
    chosen = token_ids.long()[:, None]
    value = logits.gather(1, chosen)
    # Counted in float32, which is exact here: comparing into bool and adding that up takes torch's CPU kernels ten
    # times as long.
    ranks = torch.gt(logits, value, out=torch.empty_like(logits)).sum(-1).long() + 1
    if num:
        values, indices = largest(logits, num)
        value, chosen = torch.cat([value, values], 1), torch.cat([chosen, indices], 1)
    if normalize:
        value = value - _log_normalizer(logits)
    return Entries(platform.to_host(chosen), platform.to_host(value), platform.to_host(ranks))


def _log_normalizer(logits: torch.Tensor) -> torch.Tensor:
    """Log of the sum of exponentials of each row, `[n, 1]`. On CPU row by row: torch shares a sum among its threads in
    one way for a single row and in another for several, and then the last bit would depend on the batch.
    """
    if logits.device.type == "cpu":
        return torch.stack([row.logsumexp(0, keepdim=True) for row in logits])
    return logits.logsumexp(-1, keepdim=True)


def is_normalized(mode: str) -> bool:
    """Whether a mode reports log-probabilities. Raises ValueError for one that does not exist."""
    if mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode {mode!r} does not exist: choose one of {', '.join(LOGPROBS_MODES)}")
    return mode.endswith("logprobs")


class PromptLogprobs:
    """A `RowState`: the rows whose prompt tokens are to be scored, and how.

    The logits at position j score the token at j + 1, so a chunk that ends within the prompt scores the next chunk's
    first token too. The logits are computed a bounded number of rows at a time, whatever the prompt's length. They are
    always the raw ones: nothing is sampled here.
    """

    def __init__(self, table: RequestTable, platform: Platform) -> None:
        self.table, self.platform = table, platform
        self.rows: dict[int, tuple[int, bool]] = {}  # row -> (how many, whether normalized)

    def add(self, row: int, new: NewRequest) -> None:
        num = new.sampling.prompt_logprobs
        if num is not None:
            num = self.table.vocab_size if num < 0 else min(num, self.table.vocab_size)
            self.rows[row] = num, is_normalized(new.sampling.logprobs_mode)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def concern(self, step: StepInput) -> bool:
        """Whether a request of `step` wants them, perhaps for tokens of other steps."""
        return bool(self.rows) and not self.rows.keys().isdisjoint(step.rows)

    def compute(
        self, batch: InputBatch, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, tuple[int, list[Entries]]]:
        """Batch position -> (how many best tokens, the entries in order), from the hidden states `[T, H]` of a step
        that they concern.
        """
        step = batch.step
        results = {}
        for i, row in enumerate(step.rows):
            count = min(step.num_scheduled[i], self.table.num_prompt_tokens[row] - 1 - step.num_computed[i])
            if row not in self.rows or count <= 0:
                continue
            num, normalize = self.rows[row]
            first = batch.query_start_loc[i]
            targets = self.table.token_table[row, step.num_computed[i] + 1 : step.num_computed[i] + 1 + count]
            size = min(_CHUNK_ROWS, max(1, _CHUNK_ELEMENTS // self.table.vocab_size))
            chunks = zip(hidden[first : first + count].split(size), targets.split(size))
            results[i] = num, [entries(logits(part), target, num, normalize, self.platform) for part, target in chunks]
        return results


def prompt_messages(results: dict[int, tuple[int, list[Entries]]]) -> dict[int, list[TokenLogprobs]] | None:
    """What `PromptLogprobs.compute` gave, on the host."""
    if not results:
        return None
    return {
        i: [message for part in parts for message in part.messages([num] * len(part.token_ids))]
        for i, (num, parts) in results.items()
    }
