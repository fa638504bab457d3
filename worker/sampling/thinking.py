"""The budget of thinking: once it is used, the tokens that end the thoughts are forced."""

from __future__ import annotations

import torch

from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.batch.request_table import check_token_ids
from quire.worker.messages import SamplingParams, ThinkingBudget
from quire.worker.sampling.processors import EXCLUDED, LogitsProcessor


class EndOfThinking(LogitsProcessor):
    """thinking: after `budget` tokens of a block of thoughts, the next tokens are `forced`, unless `end` has come by
    itself. Every block of an output has the whole budget.

    Output tokens of a request whose thoughts begin by themselves, with budget 3 and one token in each marker:

        0        1       2  3  4  5        6
        <begin>  t       t  t  forced[0]   forced[1]      ...
                 ^ start       ^ start + budget

    Token k of `forced` is due where a block began `budget + k` tokens ago and has not ended within its budget. A block
    that began earlier cannot be open: its end was forced. So a step looks at the last `budget` tokens, on the device,
    which alone has them; steps before output `budget` cost nothing.
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
        """Return batch indices of the rows at a position at which a token may have to be forced."""
        due = []
        for i, row in enumerate(batch.rows):
            thinking = self.rows.get(row)
            if thinking is not None:
                num_outputs = batch.positions[i] - self.table.num_prompt_tokens[row]
                if num_outputs >= thinking.budget + (0 if thinking.opened else len(thinking.begin)):
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
        num_begin, num_end, num_forced = len(thinking.begin), len(thinking.end), len(thinking.forced)
        budget, device = thinking.budget, logits.device
        # A block is looked for at `num_starts` places; forced token k is due for one that began at number
        # num_starts - 1 - k. Blocks before the last num_forced places only show that a begin marker is within thoughts.
        num_nested = min(num_forced - 1, budget)
        num_starts = num_forced + num_nested
        first = count - budget - (num_starts - 1) - num_begin  # the first output to look at; negative: before any
        position = first[:, None] + torch.arange(num_begin + num_starts - 1 + budget, device=device)
        tokens = self.table.token_table[
            row_ids[:, None], (prompt[:, None] + position).clamp(0, self.table.max_model_len - 1)
        ]
        tokens = tokens.masked_fill(position < 0, -1)

        place = torch.arange(num_starts, device=device)
        started = self._matches(tokens[:, : num_begin + num_starts - 1], thinking.begin)
        if thinking.opened:
            started = started | (first[:, None] + num_begin + place == 0)
        ends = self._matches(tokens[:, num_begin:], thinking.end)
        num_ends = torch.nn.functional.pad(ends.int().cumsum(1), (1, 0))  # that begin before each place

        def ended(start: torch.Tensor, num_tokens: int) -> torch.Tensor:
            """Return whether an end marker is among the `num_tokens` tokens from each place on."""
            after = start + max(num_tokens - num_end + 1, 0)
            return (
                num_ends[:, after.clamp(max=num_ends.shape[1] - 1)]
                > num_ends[:, start.clamp(max=num_ends.shape[1] - 1)]
            )

        due = started & ~ended(place, budget)
        for distance in range(1, num_nested + 1):
            within = started[:, :-distance] & ~ended(place[:-distance], distance)
            due[:, distance:] &= ~within
        due = due[:, num_nested:]

        number = num_forced - 1 - due.int().argmax(1)  # for the token to force
        forced = self._send(list(thinking.forced))
        only = torch.full_like(logits[:1], EXCLUDED).expand(len(which), -1).clone()
        only.scatter_(1, forced[number][:, None], 0.0)
        logits[index] = torch.where(due.any(1, keepdim=True), only, logits[index])

    def _matches(self, tokens: torch.Tensor, sequence: tuple[int, ...]) -> torch.Tensor:
        """Return where in tokens `[R, W]` the sequence begins: bool `[R, max(W - len(sequence) + 1, 1)]`."""
        if tokens.shape[1] < len(sequence):
            return torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        return (tokens.unfold(1, len(sequence), 1) == self._send(list(sequence))).all(2)
