"""The budget of thinking: once it is used, the tokens that end the thoughts are forced."""

from __future__ import annotations

import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import check_token_ids
from quire.worker.messages import SamplingParams, ThinkingBudget
from quire.worker.sampling.processors import EXCLUDED, LogitsProcessor

LATEST_BEGIN = 8  # output tokens after which thoughts that have not begun are no longer waited for


class EndOfThinking(LogitsProcessor):
    """thinking: after `budget` tokens of thoughts, the next tokens are `forced`, unless `end` has come by itself.

    Output tokens of a request whose thoughts begin by themselves, with budget 3 and one token in each marker:

        0        1       2  3  4  5        6
        <begin>  t       t  t  forced[0]   forced[1]      ...
                 ^ start       ^ start + budget

    Which rows may have to be forced in a step follows from counts (the step's positions), so other steps cost nothing;
    whether they have to depends on the tokens, which only the device's table has.
    """

    def read(self, sampling: SamplingParams) -> ThinkingBudget | None:
        thinking = sampling.thinking
        if thinking is not None:
            for name, token_ids in (("begin", thinking.begin), ("end", thinking.end), ("forced", thinking.forced)):
                check_token_ids(f"thinking.{name}", list(token_ids), self.table.vocab_size)
        return thinking

    def needed(self, batch: SamplingBatch) -> bool:
        return bool(self.rows) and bool(self._due(batch))

    def _due(self, batch: SamplingBatch) -> list[int]:
        """Batch indices of the rows at a position at which a token may have to be forced."""
        due = []
        for i, row in enumerate(batch.rows):
            thinking = self.rows.get(row)
            if thinking is not None:
                num_after = batch.positions[i] - self.table.num_prompt_tokens[row] - thinking.budget
                if 0 <= num_after < _latest_start(thinking) + len(thinking.forced):
                    due.append(i)
        return due

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        groups: dict[ThinkingBudget, list[int]] = {}
        for i in self._due(batch):
            groups.setdefault(self.rows[batch.rows[i]], []).append(i)
        for thinking, which in groups.items():
            self._force(logits, batch, which, thinking)

    def _force(self, logits: torch.Tensor, batch: SamplingBatch, which: list[int], thinking: ThinkingBudget) -> None:
        rows = [batch.rows[i] for i in which]
        prompts = [self.table.num_prompt_tokens[row] for row in rows]
        counts = [batch.positions[i] - prompt for i, prompt in zip(which, prompts)]  # output tokens so far
        index, row_ids, prompt, count = self._send([which, rows, prompts, counts])
        column = torch.arange(min(_latest_start(thinking) + thinking.budget, max(counts)), device=logits.device)
        tokens = self.table.token_table[
            row_ids[:, None], (prompt[:, None] + column).clamp(max=self.table.max_model_len - 1)
        ]
        tokens = tokens.masked_fill(column >= count[:, None], -1)

        if thinking.opened:
            start, thinks = torch.zeros_like(count), torch.ones_like(count, dtype=torch.bool)
        else:
            begins = self._matches(tokens[:, : _latest_start(thinking)], thinking.begin)
            start, thinks = begins.int().argmax(1) + len(thinking.begin), begins.any(1)
        used_up = start + thinking.budget
        ends = self._matches(tokens, thinking.end)
        position = torch.arange(ends.shape[1], device=logits.device) + len(thinking.end)
        thinks &= ~(ends & (position <= used_up[:, None])).any(1)

        number = count - used_up  # of the token to force
        forced = self._send(list(thinking.forced))
        thinks &= (number >= 0) & (number < len(forced))
        only = torch.full_like(logits[:1], EXCLUDED).expand(len(which), -1).clone()
        only.scatter_(1, forced[number.clamp(0, len(forced) - 1)][:, None], 0.0)
        logits[index] = torch.where(thinks[:, None], only, logits[index])

    def _matches(self, tokens: torch.Tensor, sequence: tuple[int, ...]) -> torch.Tensor:
        """Where in tokens `[R, W]` the sequence begins: bool `[R, max(W - len(sequence) + 1, 1)]`."""
        if tokens.shape[1] < len(sequence):
            return torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        return (tokens.unfold(1, len(sequence), 1) == self._send(list(sequence))).all(2)


def _latest_start(thinking: ThinkingBudget) -> int:
    """Output tokens before the first thought, at most."""
    return 0 if thinking.opened else LATEST_BEGIN + len(thinking.begin)
