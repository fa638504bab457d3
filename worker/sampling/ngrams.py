"""Sequences of tokens that must not occur again: the no-repeat-n-gram processors of transformers, vLLM and SGLang."""

from __future__ import annotations

import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import check_token_ids
from quire.worker.messages import NoRepeatNgram, SamplingParams
from quire.worker.sampling.processors import EXCLUDED, LogitsProcessor

_CHUNK_ELEMENTS = 1 << 24  # tokens compared at once


class RepeatedNgrams(LogitsProcessor):
    """no_repeat_ngram: exclude tokens that would end a sequence that is already in the window.

    Size 3, window 6; the last two tokens are 4 5, so that 7 is excluded:

        1 2 4 5 7 8 4 5
            ^ window
    """

    def read(self, sampling: SamplingParams) -> NoRepeatNgram | None:
        ngram = sampling.no_repeat_ngram
        if ngram is not None:
            check_token_ids("whitelist_token_ids", list(ngram.exempt), self.table.vocab_size)
        return ngram

    def needed(self, batch: SamplingBatch) -> bool:
        return bool(self.rows) and any(True for _ in self._long_enough(batch))

    def _long_enough(self, batch: SamplingBatch):
        """Yield (batch index, parameters, start of the window) of the rows whose window holds a whole sequence."""
        for i, ngram in self._using(batch):
            start = 0 if ngram.reads_prompt else self.table.num_prompt_tokens[batch.rows[i]]
            if ngram.window:
                start = max(start, batch.positions[i] - ngram.window)
            if batch.positions[i] - start >= ngram.size:
                yield i, ngram, start

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        groups: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
        for i, ngram, start in self._long_enough(batch):
            groups.setdefault((ngram.size, ngram.exempt), []).append((i, start))
        for (size, exempt), members in groups.items():
            longest = max(batch.positions[i] - start for i, start in members)
            step = max(1, _CHUNK_ELEMENTS // (longest * size))
            for first in range(0, len(members), step):
                self._exclude(logits, batch, members[first : first + step], size, exempt)

    def _exclude(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        members: list[tuple[int, int]],
        size: int,
        exempt: tuple[int, ...],
    ) -> None:
        which, starts = zip(*members)
        rows, stops = [batch.rows[i] for i in which], [batch.positions[i] for i in which]
        width = max(stop - start for stop, start in zip(stops, starts))
        index, row, start, stop = self._send([list(which), rows, list(starts), stops])
        # windows end in the same column; columns before a shorter one hold no token
        position = stop[:, None] - width + torch.arange(width, device=logits.device)
        tokens = self.table.token_table[row[:, None], position.clamp(min=0)].long()
        last = tokens[:, width - size + 1 :]
        repeats = (
            (tokens[:, :-1].unfold(1, size - 1, 1) == last[:, None]).all(2)
            if size > 1
            else tokens.new_ones(tokens.shape, dtype=torch.bool)
        )
        ends = tokens[:, size - 1 :]
        repeats &= position[:, : ends.shape[1]] >= start[:, None]
        if exempt:
            repeats &= torch.isin(ends, self._send(list(exempt)), invert=True)
        added = torch.zeros(ends.shape, dtype=logits.dtype, device=logits.device).masked_fill_(repeats, EXCLUDED)
        logits[index] = logits[index].scatter_add_(1, ends, added)
