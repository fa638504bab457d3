"""Runs a step that is out of memory as two halves, one after the other, and these as halves again, down to a single
token.

A step can be split between any two tokens if their order is kept: a token attends to the keys of earlier tokens, of its
own request or of a request whose blocks it shares. But neither the tables nor recurrent states (`state_pages.py`)
may be updated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

from quire.worker.messages import StepInput, StepOutput, TokenLogprobs

OUT_OF_MEMORY = (
    "the device is out of memory: not even one token of this request can be computed. Lower "
    "--gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens"
)

STATE_LOST = (
    "the device is out of memory: a step that updates the recurrent state of this request could not be finished, and "
    "cannot run again. Lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens"
)


class Output(Protocol):
    failed: bool  # whether a request failed because memory ran out

    def done(self) -> bool: ...

    def result(self) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step whose table updates are done, with the batch positions of its requests in the whole step."""

    step: StepInput
    positions: list[int]
    checkpoint: int | None = None  # page for the state before its first token


def halves(
    step: StepInput, whole_prompts: bool = False, uncut: Sequence[tuple[int, int]] = ()
) -> tuple[Part, Part] | None:
    """Split a step into two parts with about half the tokens each. Returns None for a single token or, with
    `whole_prompts`, a single request. A single request is not split within a span of `uncut`, given as [start, stop) of
    its chunk.
    """
    if len(step.rows) > 1:
        ends = list(accumulate(step.num_scheduled))
        cut = min(range(1, len(ends)), key=lambda i: abs(2 * ends[i - 1] - ends[-1]))
        return _requests(step, 0, cut), _requests(step, cut, len(ends))
    (row,), (computed,), (scheduled,) = step.rows, step.num_computed, step.num_scheduled
    cuts = [cut for cut in range(1, scheduled) if not any(start < cut < stop for start, stop in uncut)]
    if not cuts or whole_prompts:
        return None
    first = min(cuts, key=lambda cut: abs(cut - scheduled // 2))
    stops = step.checkpoints.get(0, [])
    before = {0: [stop for stop in stops if stop[0] < first]}
    after = {0: [(count - first, page) for count, page in stops if count > first]}
    return (
        Part(StepInput(step.step, [], [row], [computed], [first], [[]], [], checkpoints=before), [0]),
        Part(
            StepInput(
                step.step, [], [row], [computed + first], [scheduled - first], [[]], step.samples, checkpoints=after
            ),
            [0],
            dict(stops).get(first),
        ),
    )


def _requests(step: StepInput, start: int, stop: int) -> Part:
    part = slice(start, stop)
    samples = [i - start for i in step.samples if start <= i < stop]
    return Part(
        StepInput(
            step.step,
            [],
            step.rows[part],
            step.num_computed[part],
            step.num_scheduled[part],
            [[] for _ in step.rows[part]],
            samples,
            checkpoints={i - start: stops for i, stops in step.checkpoints.items() if start <= i < stop},
        ),
        list(range(start, stop)),
    )


def runs(step: StepInput, marks: Sequence[bool]) -> list[tuple[bool, Part]]:
    """Split a step, whose requests have `marks`, into runs of requests with the same mark."""
    groups = [list(group) for _, group in groupby(range(len(marks)), key=lambda i: marks[i])]
    return [(marks[group[0]], _requests(step, group[0], group[-1] + 1)) for group in groups]


def without_drafts(step: StepInput) -> Part:
    """Return the whole step without its drafts: each of its requests samples one token."""
    scheduled = [count - step.num_draft.get(i, 0) for i, count in enumerate(step.num_scheduled)]
    return Part(
        StepInput(
            step.step,
            [],
            step.rows,
            step.num_computed,
            scheduled,
            [[] for _ in step.rows],
            step.samples,
            checkpoints=step.checkpoints,
        ),
        list(range(len(step.rows))),
    )


@dataclass(slots=True)
class SplitOutput:
    """The outputs of a step's parts as one output."""

    step: StepInput
    parts: list[tuple[Part, Output]]
    failed: bool

    def done(self) -> bool:
        return all(output.done() for _, output in self.parts)

    def result(self) -> StepOutput:
        token_ids: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        pooled: dict[int, bytes] = {}
        num_draft: dict[int, int] = {}
        predicted: list[int] = []
        for part, output in self.parts:
            result = output.result()
            token_ids += result.token_ids
            logprobs += result.logprobs or [None] * len(result.token_ids)
            for i, entries in (result.prompt_logprobs or {}).items():
                prompt_logprobs.setdefault(part.positions[i], []).extend(entries)
            errors |= {part.positions[i]: message for i, message in (result.errors or {}).items()}
            pooled |= {part.positions[i]: vector for i, vector in (result.pooled or {}).items()}
            num_draft |= {part.positions[i]: count for i, count in (result.num_draft or {}).items()}
            predicted += [part.positions[i] for i in result.predicted or []]
        return StepOutput(
            self.step.step,
            token_ids,
            logprobs if any(logprobs) else None,
            prompt_logprobs or None,
            errors or None,
            pooled or None,
            num_draft or None,
            predicted or None,
        )


@dataclass(slots=True)
class Failed:
    """The output of a step that ran out of memory.

    Every request in the step fails: its tokens are missing in the KV cache, also for requests that share its blocks.
    """

    step: StepInput
    failed: bool = True
    message: str = OUT_OF_MEMORY

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        return StepOutput(
            self.step.step,
            [[] for _ in self.step.samples],
            errors=dict.fromkeys(range(len(self.step.rows)), self.message),
        )
