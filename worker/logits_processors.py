"""What changes a row's logits before sampling: a list of row states, each with the rows that use it, each one file-local rule.

They run in the order of `logits_processors()`: masks, then bias, then penalties; an excluded token is -inf and stays so. A step in which no sampling
row uses a processor does not call it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from worker.input_batch import SamplingBatch
from worker.messages import NewRequest, SamplingParams
from worker.platform import Platform
from worker.request_table import RequestTable, check_token_ids

_EXCLUDED = float("-inf")


class LogitsProcessor(ABC):
    """A `RowState` that keeps what `read` makes of a request's parameters, if anything, and applies it."""

    def __init__(self, table: RequestTable, platform: Platform) -> None:
        self.table, self.platform = table, platform
        self.rows: dict[int, Any] = {}

    def add(self, row: int, new: NewRequest) -> None:
        entry = self.read(new.sampling)
        if entry is not None:
            self.rows[row] = entry

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def needed(self, batch: SamplingBatch) -> bool:
        """Whether some row of the batch uses this."""
        return bool(self.rows) and not self.rows.keys().isdisjoint(batch.rows)

    @abstractmethod
    def read(self, sampling: SamplingParams) -> Any:
        """What to remember of a request, None if it does not use this. Raises ValueError for a parameter that cannot be served."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        """Change logits `[S, V]` of the rows that use this, in place."""

    def _using(self, batch: SamplingBatch) -> list[tuple[int, Any]]:
        """(batch index, entry) of those rows."""
        return [(i, self.rows[row]) for i, row in enumerate(batch.rows) if row in self.rows]

    def _token_ids(self, what: str, token_ids: list[int]) -> torch.Tensor:
        check_token_ids(what, token_ids, self.table.vocab_size)
        return self.platform.to_device(np.array(token_ids, dtype=np.int64))


class AllowedTokens(LogitsProcessor):
    """allowed_token_ids: all others are excluded."""

    def read(self, sampling: SamplingParams) -> torch.Tensor | None:
        return None if sampling.allowed_token_ids is None else self._token_ids("allowed_token_ids", sampling.allowed_token_ids)

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        for i, allowed in self._using(batch):
            kept = logits[i, allowed]
            logits[i].fill_(_EXCLUDED)
            logits[i, allowed] = kept


@dataclass(slots=True)
class _Words:
    """N token sequences: their last tokens `[N]`, what stands before them `[N, L]`, right-aligned, and where that is padding."""

    last: torch.Tensor
    before: torch.Tensor
    padding: torch.Tensor
    length: int


class BadWords(LogitsProcessor):
    """bad_words: the last token of each sequence is excluded where the others stand before it, in the prompt or the output."""

    def read(self, sampling: SamplingParams) -> _Words | None:
        words = [word for word in sampling.bad_words_ids or [] if word]
        if not words:
            return None
        length = max(len(word) for word in words) - 1
        before = [[-1] * (length - len(word) + 1) + word[:-1] for word in words]
        check_token_ids("bad_words", [token for word in words for token in word], self.table.vocab_size)
        tensor = self.platform.to_device(np.array(before, dtype=np.int64).reshape(len(words), length))
        return _Words(self.platform.to_device(np.array([word[-1] for word in words], dtype=np.int64)), tensor, tensor < 0, length)

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        for i, words in self._using(batch):
            length = min(words.length, batch.positions[i])
            stop = batch.positions[i]
            tokens = self.table.token_table[batch.rows[i], stop - length : stop]
            hit = (words.before[:, words.length - length :] == tokens) | words.padding[:, words.length - length :]
            hit = hit.all(1) & words.padding[:, : words.length - length].all(1)  # a sequence longer than the context cannot have begun
            logits[i].scatter_add_(0, words.last, torch.where(hit, _EXCLUDED, 0.0))  # adding, since two sequences may end in the same token


class MinTokens(LogitsProcessor):
    """min_tokens: what would end the output is excluded until it has that many tokens."""

    def read(self, sampling: SamplingParams) -> tuple[int, torch.Tensor] | None:
        ends = [*sampling.stop_token_ids, *sampling.eos_token_ids]
        return (sampling.min_tokens, self._token_ids("stop_token_ids", ends)) if sampling.min_tokens > 0 and ends else None

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        for i, (min_tokens, ends) in self._using(batch):
            row = batch.rows[i]
            if batch.positions[i] - self.table.num_prompt_tokens[row] < min_tokens:
                logits[i].index_fill_(0, ends, _EXCLUDED)
            else:
                self.remove(row)  # it only grows; a preempted request comes back as a new one


class LogitBias(LogitsProcessor):
    """logit_bias: added to the logits of the named tokens."""

    def read(self, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not sampling.logit_bias:
            return None
        bias = self.platform.to_device(np.array(list(sampling.logit_bias.values()), dtype=np.float32))
        return self._token_ids("logit_bias", list(sampling.logit_bias)), bias

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        for i, (token_ids, bias) in self._using(batch):
            logits[i].index_add_(0, token_ids, bias)


class Penalties(LogitsProcessor):
    """repetition_penalty over prompt and output (positive logits are divided by it, others multiplied: Keskar et al., arXiv:1909.05858), then
    frequency_penalty per occurrence in the output and presence_penalty once if there is one. Counts are made from the token table each step.
    """

    def read(self, sampling: SamplingParams) -> tuple[float, float, float] | None:
        values = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        return None if values == (1.0, 0.0, 0.0) else values

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        using = self._using(batch)
        which = [i for i, _ in using]
        rows = [batch.rows[i] for i in which]
        lengths = [batch.positions[i] for i in which]
        prompts = [min(self.table.num_prompt_tokens[row], length) for row, length in zip(rows, lengths)]
        index, row_ids, length, prompt = self.platform.to_device(np.array([which, rows, lengths, prompts], dtype=np.int64))
        repetition, frequency, presence = self.platform.to_device(np.array([values for _, values in using], dtype=np.float32).T.copy())[:, :, None]

        position = torch.arange(max(lengths), device=logits.device)
        tokens = self.table.token_table[row_ids, : max(lengths)].long()
        real = position < length[:, None]
        tokens = torch.where(real, tokens, tokens[:, :1])  # behind the end stands the first token once more: equal tokens get equal values
        target = logits if len(which) == len(logits) else logits[index]
        x = target.gather(1, tokens)
        x = torch.where(x > 0, x / repetition, x * repetition)
        if any(values[1:] != (0.0, 0.0) for _, values in using):
            in_output = real & (position >= prompt[:, None])
            count = torch.zeros_like(target).scatter_add_(1, tokens, in_output.float()).gather(1, tokens)
            x = x - count * frequency - (count > 0) * presence
        target.scatter_(1, tokens, x)
        if target is not logits:
            logits[index] = target


def logits_processors(table: RequestTable, platform: Platform) -> list[LogitsProcessor]:
    """All of them, in the order they run."""
    return [cls(table, platform) for cls in (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties)]
