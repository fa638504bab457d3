"""Logits processors: row states that change a row's logits before sampling, one class per parameter.

They run in the order of `logits_processors()`: masks, then bias, then penalties; an excluded token is -inf and stays
-inf. A step calls a processor only if one of its sampling rows uses it. A processor changes all its rows at once: data
common to the rows is composed when the rows of the batch change and reused until they change again, so that a step
takes a few kernel launches however many rows there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import RequestTable, check_token_ids
from quire.worker.messages import NewRequest, SamplingParams
from quire.worker.platforms.base import Platform

EXCLUDED = float("-inf")
# up to this many runs of rows are filled one by one: several times faster than by index, but one launch each
_MAX_RUNS = 8
_CHUNK_ELEMENTS = 1 << 24  # logits whose penalties are computed at once, which bounds the copies


class LogitsProcessor(ABC):
    """A `RowState` that stores the result of `read` for each row that uses it, and applies it."""

    def __init__(self, table: RequestTable, platform: Platform) -> None:
        self.table, self.platform = table, platform
        self.rows: dict[int, Any] = {}
        # (rows of a batch, row stride, result of `compose`); None after an entry changed
        self._composed: tuple[list[int], int, Any] | None = None

    def add(self, row: int, new: NewRequest) -> None:
        entry = self.read(new.sampling)
        if entry is not None:
            self.rows[row] = entry
            self._composed = None

    def remove(self, row: int) -> None:
        if self.rows.pop(row, None) is not None:
            self._composed = None

    def needed(self, batch: SamplingBatch) -> bool:
        """Return whether a row of the batch uses this processor."""
        return bool(self.rows) and not self.rows.keys().isdisjoint(batch.rows)

    @abstractmethod
    def read(self, sampling: SamplingParams) -> Any:
        """Return the data to store for a request, or None if it does not use this processor.

        Raises ValueError for an invalid parameter.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        """Change the logits `[S, V]` of the rows that use this processor, in place."""

    def compose(self, using: list[tuple[int, Any]], stride: int, batch: SamplingBatch) -> Any:
        """Return the data that `apply` reads for the rows that use this processor, at least one. It depends only on
        `batch.rows`, the entries and the row stride of the logits.
        """
        raise NotImplementedError

    def _flat_and_composed(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, Any]:
        """Return the logits as one flat row, for which kernels are fastest, and the result of `compose` for this
        batch's rows.
        """
        stride = logits.stride(0) if len(logits) > 1 else logits.shape[1]
        if self._composed is None or self._composed[:2] != (batch.rows, stride):
            self._composed = batch.rows, stride, self.compose(self._using(batch), stride, batch)
        return logits.as_strided(((len(logits) - 1) * stride + logits.shape[1],), (1,)), self._composed[2]

    def _using(self, batch: SamplingBatch) -> list[tuple[int, Any]]:
        """Return (batch index, entry) of the rows that use this processor."""
        return [(i, self.rows[row]) for i, row in enumerate(batch.rows) if row in self.rows]

    def _token_ids(self, name: str, token_ids: list[int]) -> torch.Tensor:
        check_token_ids(name, token_ids, self.table.vocab_size)
        return self._send(token_ids)

    def _send(self, numbers: list[int]) -> torch.Tensor:
        return self.platform.to_device(np.array(numbers, dtype=np.int64))

    def _elements(self, which: list[int], token_ids: list[torch.Tensor], stride: int) -> torch.Tensor:
        """Return flat indices of the logits of `token_ids[i]` in the batch's row `which[i]`."""
        return self._repeated([i * stride for i in which], token_ids).add_(torch.cat(token_ids))

    def _repeated(self, numbers: list[int], parts: list[torch.Tensor]) -> torch.Tensor:
        """Repeat numbers[i] for each element of parts[i]."""
        counts = [len(part) for part in parts]
        sent = self._send([numbers, counts])
        return torch.repeat_interleave(sent[0], sent[1], output_size=sum(counts))


class AllowedTokens(LogitsProcessor):
    """allowed_token_ids: exclude all other tokens."""

    def read(self, sampling: SamplingParams) -> torch.Tensor | None:
        return (
            None
            if sampling.allowed_token_ids is None
            else self._token_ids("allowed_token_ids", sampling.allowed_token_ids)
        )

    def compose(
        self, using: list[tuple[int, torch.Tensor]], stride: int, batch: SamplingBatch
    ) -> tuple[list[slice], torch.Tensor, torch.Tensor]:
        """Return (runs of consecutive rows, all rows, elements)."""
        which = [i for i, _ in using]
        runs: list[slice] = []
        for i in which:
            start = runs.pop().start if runs and runs[-1].stop == i else i
            runs.append(slice(start, i + 1))
        return runs, self._send(which), self._elements(which, [allowed for _, allowed in using], stride)

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        flat, (runs, which, elements) = self._flat_and_composed(logits, batch)
        kept = flat.index_select(0, elements)
        if len(runs) <= _MAX_RUNS:
            for run in runs:
                logits[run].fill_(EXCLUDED)
        else:
            logits.index_fill_(0, which, EXCLUDED)
        flat.scatter_(0, elements, kept)


@dataclass(slots=True)
class _Words:
    """N token sequences, with B tokens before their last ones. Memory is proportional to the number of tokens."""

    last: torch.Tensor  # [M] the distinct last tokens
    ends: torch.Tensor  # [N] index in `last` of each sequence's last token
    before: torch.Tensor  # [B] int32: the other tokens, one sequence after another
    distance: torch.Tensor  # [B] distance of each from the end of its sequence, from 1
    word: torch.Tensor  # [B] index of its sequence


class BadWords(LogitsProcessor):
    """bad_words: exclude the last token of a sequence if the other tokens precede it, in the prompt or the output."""

    def read(self, sampling: SamplingParams) -> _Words | None:
        words = [word for word in sampling.bad_words_ids or [] if word]
        if not words:
            return None
        lengths = np.array([len(word) for word in words], dtype=np.int64)
        tokens = np.fromiter(chain.from_iterable(words), np.int64, int(lengths.sum()))
        if tokens.min() < 0 or tokens.max() >= self.table.vocab_size:
            check_token_ids("bad_words", tokens.tolist(), self.table.vocab_size)
        distance = np.repeat(lengths.cumsum(), lengths) - 1 - np.arange(len(tokens))  # 0 at a last token
        before = distance > 0
        last, ends = np.unique(tokens[~before], return_inverse=True)
        word = np.repeat(np.arange(len(words)), lengths)
        send = self.platform.to_device
        return _Words(
            send(last), send(ends), send(tokens[before].astype(np.int32)), send(distance[before]), send(word[before])
        )

    def compose(
        self, using: list[tuple[int, _Words]], stride: int, batch: SamplingBatch
    ) -> tuple[_Words, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (all words as one, batch index and start in the token table of each `before` token, elements to
        exclude).
        """
        which = [i for i, _ in using]
        last, ends, before, distance, word = (
            [getattr(words, name) for _, words in using] for name in ("last", "ends", "before", "distance", "word")
        )
        first_last, first_word = ([0, *accumulate(map(len, parts))][:-1] for parts in (last, ends))
        joined = _Words(
            torch.cat(last),
            torch.cat(ends) + self._repeated(first_last, ends),
            torch.cat(before),
            torch.cat(distance),
            torch.cat(word) + self._repeated(first_word, word),
        )
        rows = self._repeated(which, before)
        start = batch.rows_tensor[rows] * self.table.max_model_len
        return joined, rows, start, self._elements(which, last, stride)

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        flat, (words, rows, start, elements) = self._flat_and_composed(logits, batch)
        position = batch.positions_tensor[rows] - words.distance
        differs = self.table.token_table.view(-1)[start + position.clamp(min=0)] != words.before
        differs |= position < 0  # a sequence longer than the context cannot match
        misses = torch.zeros_like(words.ends).scatter_add_(0, words.word, differs.long())
        # Several sequences may end in the same token.
        hits = torch.zeros_like(words.last).scatter_add_(0, words.ends, (misses == 0).long())
        flat.scatter_(0, elements, flat.index_select(0, elements).masked_fill_(hits > 0, EXCLUDED))


class MinTokens(LogitsProcessor):
    """min_tokens: exclude tokens that would end the output until it has that many tokens."""

    def read(self, sampling: SamplingParams) -> tuple[int, torch.Tensor] | None:
        ends = [*sampling.stop_token_ids, *sampling.eos_token_ids]
        return (
            (sampling.min_tokens, self._token_ids("stop_token_ids", ends)) if sampling.min_tokens > 0 and ends else None
        )

    def compose(
        self, using: list[tuple[int, tuple[int, torch.Tensor]]], stride: int, batch: SamplingBatch
    ) -> torch.Tensor:
        return self._elements([i for i, _ in using], [ends for _, (_, ends) in using], stride)

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        if batch.drafts:
            self._apply_by_position(logits, batch)
            return
        for i, row in enumerate(batch.rows):
            if row in self.rows and self._has_enough(i, batch):
                self.remove(row)  # the output only grows; a preempted request is added again as a new one
        if self.needed(batch):
            flat, elements = self._flat_and_composed(logits, batch)
            flat.scatter_(0, elements, EXCLUDED)

    def _has_enough(self, i: int, batch: SamplingBatch) -> bool:
        row = batch.rows[i]
        return batch.positions[i] - self.table.num_prompt_tokens[row] >= self.rows[row][0]

    def _apply_by_position(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        """Exclude tokens at positions with too few tokens; a row with drafts has several positions."""
        using = [(i, entry) for i, entry in self._using(batch) if not self._has_enough(i, batch)]
        if using:
            stride = logits.stride(0) if len(logits) > 1 else logits.shape[1]
            flat = logits.as_strided(((len(logits) - 1) * stride + logits.shape[1],), (1,))
            flat.scatter_(0, self.compose(using, stride, batch), EXCLUDED)


class LogitBias(LogitsProcessor):
    """logit_bias: add the bias to the logits of the given tokens."""

    def read(self, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not sampling.logit_bias:
            return None
        bias = self.platform.to_device(np.array(list(sampling.logit_bias.values()), dtype=np.float32))
        return self._token_ids("logit_bias", list(sampling.logit_bias)), bias

    def compose(
        self, using: list[tuple[int, tuple[torch.Tensor, torch.Tensor]]], stride: int, batch: SamplingBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        elements = self._elements([i for i, _ in using], [token_ids for _, (token_ids, _) in using], stride)
        return elements, torch.cat([bias for _, (_, bias) in using])

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        flat, (elements, bias) = self._flat_and_composed(logits, batch)
        flat.scatter_add_(0, elements, bias)  # the tokens of a row are distinct


class Penalties(LogitsProcessor):
    """repetition_penalty over prompt and output (positive logits are divided by it, others multiplied: Keskar et al.,
    arXiv:1909.05858), then frequency_penalty per occurrence in the output and presence_penalty once per token in the
    output; with repeat_last_n all three over the last tokens of both. Counts are computed from the token table in each
    step.
    """

    def read(self, sampling: SamplingParams) -> tuple[float, float, float, int | None] | None:
        if sampling.chain is not None and (sampling.chain.mirostat or sampling.chain.order[:1] != ("penalties",)):
            return None  # none, or `chain/rows.py` computes them
        return self.values(sampling)

    @staticmethod
    def values(sampling: SamplingParams) -> tuple[float, float, float, int | None] | None:
        """Return the three penalties and the number of tokens that count; None if nothing is penalized."""
        values = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        return None if values == (1.0, 0.0, 0.0) or sampling.repeat_last_n == 0 else (*values, sampling.repeat_last_n)

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        self.penalize(logits, [(i, i, values) for i, values in self._using(batch)], batch)

    def penalize(
        self,
        logits: torch.Tensor,
        using: list[tuple[int, int, tuple[float, float, float, int | None]]],
        batch: SamplingBatch,
    ) -> None:
        """Change rows of logits. `using` has (row of the logits, sampling row of the batch, `values`)."""
        if using and self.platform.ops.fused_penalize is not None:
            numbers, values = self._numbers(using, batch)
            # as many 64-bit words: one copy brings both
            sent = self.platform.to_device(np.append(numbers, np.resize(values, 4 * len(using)).view(np.int64)))
            numbers, values = sent[: numbers.size].view(5, -1), sent[numbers.size :].view(torch.float32).view(4, -1)
            self.platform.ops.fused_penalize(logits, self.table.token_table, numbers, values)
        elif using:
            size = max(1, _CHUNK_ELEMENTS // max(logits.shape[1], max(batch.positions[i] for _, i, _ in using)))
            for first in range(0, len(using), size):
                self._penalize(logits, using[first : first + size], batch)

    def _numbers(
        self, using: list[tuple[int, int, tuple[float, float, float, int | None]]], batch: SamplingBatch
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the arguments `numbers` and `values` of `cuda.kernels.triton_logits.penalize`, on the host."""
        numbers = []
        for place, i, (_, _, _, last_n) in using:
            row, length = batch.rows[i], batch.positions[i]
            # from where tokens count: for the repetition penalty, and for the two others
            start = 0 if last_n is None or last_n < 0 else max(length - last_n, 0)
            prompt = min(self.table.num_prompt_tokens[row], length) if last_n is None else start
            numbers.append((place, row, length, start, prompt))
        values = np.array([values[:3] for _, _, values in using], dtype=np.float32)
        return np.array(numbers, dtype=np.int64).T.copy(), values.T.copy()

    def _penalize(
        self,
        logits: torch.Tensor,
        using: list[tuple[int, int, tuple[float, float, float, int | None]]],
        batch: SamplingBatch,
    ) -> None:
        numbers, values = self._numbers(using, batch)
        which, longest = numbers[0], int(numbers[2].max())
        index, row_ids, length, start, prompt = self.platform.to_device(numbers)
        repetition, frequency, presence = self.platform.to_device(values)[:, :, None]

        position = torch.arange(longest, device=logits.device)
        tokens = self.table.token_table[row_ids, :longest].long()
        real = (position < length[:, None]) & (position >= start[:, None])
        # pad with the last token: equal tokens get equal values
        tokens = torch.where(real, tokens, tokens.gather(1, length[:, None] - 1))
        target = logits if len(which) == len(logits) else logits[index]
        x = target.gather(1, tokens)
        x = torch.where(x > 0, x / repetition, x * repetition)
        if any(values[1:3] != (0.0, 0.0) for _, _, values in using):
            in_output = real & (position >= prompt[:, None])
            count = torch.zeros_like(target).scatter_add_(1, tokens, in_output.float()).gather(1, tokens)
            x = x - count * frequency - (count > 0) * presence
        target.scatter_(1, tokens, x)
        if target is not logits:
            logits[index] = target


def logits_processors(table: RequestTable, platform: Platform) -> list[LogitsProcessor]:
    """Create all processors, in the order in which they run."""
    return [cls(table, platform) for cls in (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties)]
