"""Log-probabilities of sampled tokens and prompt tokens: computed on the device, copied to the host, converted to
messages there.
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

_CHUNK_ROWS, _CHUNK_ELEMENTS = 256, 1 << 24  # prompt logits computed at once


@dataclass(slots=True)
class Entries:
    """n positions being copied to the host: the token at each position and the most likely tokens.

    Read them after the step's event has passed.
    """

    token_ids: torch.Tensor  # [n, 1 + k]
    values: torch.Tensor  # [n, 1 + k] float32
    ranks: torch.Tensor  # [n]

    def messages(self, counts: list[int]) -> list[TokenLogprobs]:
        """Return one message per position: the token at the position and `counts[i]` of the most likely tokens."""
        token_ids, values = self.token_ids.tolist(), self.values.tolist()
        return [
            TokenLogprobs(t[: 1 + n], v[: 1 + n], rank)
            for t, v, rank, n in zip(token_ids, values, self.ranks.tolist(), counts)
        ]


def entries(logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalize: bool, platform: Platform) -> Entries:
    """Return, for each row of logits `[n, V]` float32, the values of `token_ids[i]` and of the `num` best tokens, and
    the rank of `token_ids[i]`. A negative one, of a row without a token, stands for token 0.

    Values are log-probabilities, or the logits themselves without `normalize`.
    """
    if platform.ops.fused_logprobs is not None:
        best = largest(logits, num) if num else None
        packed, unpack = platform.ops.fused_logprobs(logits, token_ids.long(), best, normalize)
        return Entries(*unpack(platform.to_host(packed)))
    token_ids = token_ids.long().clamp(min=0)
    if (native := platform.ops.logprobs(logits, token_ids, num, normalize)) is not None:
        return Entries(*native)
    chosen = token_ids[:, None]
    value = logits.gather(1, chosen)
    # Count in float32, which is exact here: comparing into bool and summing takes torch's CPU kernels ten times as
    # long.
    ranks = torch.gt(logits, value, out=torch.empty_like(logits)).sum(-1).long() + 1
    if num:
        values, indices = largest(logits, num)
        value, chosen = torch.cat([value, values], 1), torch.cat([chosen, indices], 1)
    if normalize:
        value = value - _log_normalizer(logits, platform.sums_by_row)
    return Entries(platform.to_host(chosen), platform.to_host(value), platform.to_host(ranks))


def _log_normalizer(logits: torch.Tensor, by_row: bool) -> torch.Tensor:
    """Return the log of the sum of exponentials of each row, `[n, 1]`; `by_row`: see `Platform.sums_by_row`."""
    if by_row:
        return torch.stack([row.logsumexp(0, keepdim=True) for row in logits])
    return logits.logsumexp(-1, keepdim=True)


def is_normalized(mode: str) -> bool:
    """Return whether a mode reports log-probabilities. Raises ValueError for an unknown mode."""
    if mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode is {mode!r}, but must be one of {', '.join(LOGPROBS_MODES)}")
    return mode.endswith("logprobs")


class PromptLogprobs:
    """A `RowState`: the rows whose prompt tokens are scored, and their parameters.

    The logits at position j score the token at j + 1, so a chunk that ends inside the prompt also scores the next
    chunk's first token. Logits are computed for a bounded number of rows at a time, whatever the prompt's length. They
    are always raw logits, because no token is sampled here.
    """

    def __init__(self, table: RequestTable, platform: Platform) -> None:
        self.table, self.platform = table, platform
        self.rows: dict[int, tuple[int, bool]] = {}  # row -> (number of tokens, whether normalized)

    def add(self, row: int, new: NewRequest) -> None:
        num = new.sampling.prompt_logprobs
        if num is not None:
            num = self.table.vocab_size if num < 0 else min(num, self.table.vocab_size)
            self.rows[row] = num, is_normalized(new.sampling.logprobs_mode)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def needed(self, step: StepInput) -> bool:
        """Return whether a request of `step` needs prompt logprobs, possibly for tokens of other steps."""
        return bool(self.rows) and not self.rows.keys().isdisjoint(step.rows)

    def compute(
        self, batch: InputBatch, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, tuple[int, list[Entries]]]:
        """Return batch position -> (number of best tokens, entries in order), from the hidden states `[T, H]` of a
        step.
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
    """Convert the result of `PromptLogprobs.compute` to messages, on the host."""
    if not results:
        return None
    return {
        i: [message for part in parts for message in part.messages([num] * len(part.token_ids))]
        for i, (num, parts) in results.items()
    }
