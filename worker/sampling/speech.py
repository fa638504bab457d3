"""The rules for the output of a speech recognizer: tokens that are never sampled, and timestamps (Whisper)."""

from __future__ import annotations

import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import check_token_ids
from quire.worker.messages import SamplingParams, SpeechRules
from quire.worker.sampling.processors import EXCLUDED, LogitsProcessor


class SpeechTokens(LogitsProcessor):
    """speech: exclude what the rules do not allow next.

    Timestamps, from `timestamp_begin` on: the output begins with one. Text follows a pair of them; after a single one
    that ends a segment, another or the end of the output. None is below the last one, and a segment has a length above
    0. If the timestamps together are likelier than each text token, a timestamp comes next.
    """

    def read(self, sampling: SamplingParams) -> SpeechRules | None:
        rules = sampling.speech
        if rules is not None:
            named = [*rules.suppress, *rules.suppress_first, rules.timestamp_begin, rules.end]
            check_token_ids("speech", named, self.table.vocab_size)
        return rules

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        timed: dict[tuple[int, int], list[tuple[int, SpeechRules]]] = {}
        flat, elements = self._flat_and_composed(logits, batch)
        flat.index_fill_(0, elements, EXCLUDED)
        for i, rules in self._using(batch):
            first = batch.positions[i] == self.table.num_prompt_tokens[batch.rows[i]]
            if first and rules.suppress_first:
                logits[i].index_fill_(0, self._send(list(rules.suppress_first)), EXCLUDED)
            if not rules.timestamp_begin:
                continue
            if first:
                logits[i, : rules.timestamp_begin] = EXCLUDED
                if rules.max_first >= 0:
                    logits[i, rules.timestamp_begin + rules.max_first + 1 :] = EXCLUDED
            else:
                timed.setdefault((rules.timestamp_begin, rules.end), []).append((i, rules))
        for (begin, end), members in timed.items():
            self._follow(logits, batch, [i for i, _ in members], begin, end)

    def compose(self, using: list[tuple[int, SpeechRules]], stride: int, batch: SamplingBatch) -> torch.Tensor:
        return self._elements([i for i, _ in using], [self._send(list(rules.suppress)) for _, rules in using], stride)

    def _follow(self, logits: torch.Tensor, batch: SamplingBatch, which: list[int], begin: int, end: int) -> None:
        """Apply the rules for timestamps to rows of the logits that have at least one token of output."""
        rows = [batch.rows[i] for i in which]
        starts, stops = [self.table.num_prompt_tokens[row] for row in rows], [batch.positions[i] for i in which]
        width = max(stop - start for start, stop in zip(starts, stops))
        index, row, start, stop = self._send([which, rows, starts, stops])
        position = start[:, None] + torch.arange(width, device=logits.device)
        real = position < stop[:, None]
        tokens = self.table.token_table[row[:, None], position.clamp(max=self.table.max_model_len - 1)].long()
        timestamps = torch.where(real & (tokens >= begin), tokens, -1)
        count = (stop - start)[:, None]
        last = timestamps.gather(1, count - 1) >= 0
        before = (timestamps.gather(1, (count - 2).clamp(min=0)) >= 0) | (count < 2)
        largest = timestamps.amax(1, keepdim=True)
        lowest = torch.where(last & ~before, largest, largest + 1)  # -1 + 1 is below all timestamps
        ids = torch.arange(logits.shape[1], device=logits.device)
        excluded = (ids >= begin) & (ids < lowest)
        excluded |= last & before & (ids >= begin)
        excluded |= last & ~before & (ids < end)
        found = logits[index].masked_fill_(excluded, EXCLUDED)
        likelier = found[:, begin:].logsumexp(1) > found[:, :begin].amax(1)
        found[:, :begin].masked_fill_(likelier[:, None], EXCLUDED)
        logits[index] = found
