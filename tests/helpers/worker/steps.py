"""Writes steps as a scheduler would send them for a few requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.worker.messages import NewRequest, SamplingParams, StepInput, StepOutput

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Script:
    """Holds requests in rows, with block ids assigned in order and never released; `step` runs any of their tokens."""

    block_size: int
    next_block: int = 1
    step_number: int = 0
    rows: dict[int, _Row] = field(default_factory=dict)

    def add(
        self, row: int, prompt: list[int], sampling: SamplingParams = GREEDY, outputs: list[int] | None = None
    ) -> None:
        self.rows[row] = _Row(prompt, sampling, list(outputs or []))

    def step(self, scheduled: dict[int, int]) -> StepInput:
        """Return a step of `counts`: row -> number of tokens, in batch order."""
        new, new_blocks, computed, samples = [], [], [], []
        for i, (row, count) in enumerate(scheduled.items()):
            state = self.rows[row]
            blocks = self._blocks(state, state.computed + count)
            if not state.sent:
                new.append(
                    NewRequest(
                        row, state.prompt + state.outputs, len(state.prompt), [list(state.blocks)], state.sampling
                    )
                )
                blocks = []
            state.sent = True
            new_blocks.append([blocks] if blocks else [])
            computed.append(state.computed)
            state.computed += count
            if state.computed == len(state.prompt) + len(state.outputs):
                samples.append(i)
        self.step_number += 1
        return StepInput(
            self.step_number, new, list(scheduled), computed, list(scheduled.values()), new_blocks, samples
        )

    def receive(self, step: StepInput, output: StepOutput) -> None:
        for i, token_ids in zip(step.samples, output.token_ids):
            self.rows[step.rows[i]].outputs += token_ids

    def preempt(self, row: int) -> None:
        """Preempt a request: it is recomputed from its first token, in new blocks."""
        state = self.rows[row]
        self.rows[row] = _Row(state.prompt, state.sampling, state.outputs)

    def _blocks(self, state: _Row, length: int) -> list[int]:
        missing = -(-length // self.block_size) - len(state.blocks)
        blocks = list(range(self.next_block, self.next_block + missing))
        self.next_block += max(missing, 0)
        state.blocks += blocks
        return blocks


@dataclass
class _Row:
    prompt: list[int]
    sampling: SamplingParams
    outputs: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sent: bool = False
