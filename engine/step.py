"""One scheduled step: its input for the worker, and the requests at its batch positions.

A step may verify drafts of a running request (`StepInput.num_draft`), of which the scheduler knows only the number.
The request's next step is scheduled when the number of accepted drafts is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.engine.request import Request, Status
from quire.worker.messages import StepInput, StepOutput, TokenLogprobs


@dataclass(slots=True)
class Step:
    """One scheduled step. `requests[i]` is at batch position i of `input`.

    `published` lists, per request, the blocks that became visible to other requests when this step was scheduled. This
    step or an earlier one fills them.
    """

    input: StepInput
    requests: list[Request]
    num_tokens: int = 0
    published: dict[Request, list[int]] = field(default_factory=dict)
    # batch positions whose results are discarded because they were computed from blocks of a failed request
    ignored: set[int] = field(default_factory=set)
    scheduled: float = field(default_factory=time.monotonic)

    def contents(self) -> str:
        """Return the contents of the step, for the log."""
        counts = self.input.num_scheduled
        num_decodes = sum(count == 1 for count in counts)
        text = f"{len(counts)} requests with {self.num_tokens} tokens, of which {num_decodes} had one each"
        if num_decodes < len(counts):
            text += f" and the largest {max(counts)} after {max(self.input.num_computed)} computed ones"
        return text + (f", and {len(self.input.encode)} images" if self.input.encode else "")

    def add(self, request: Request, start: int, num_new: int, new_blocks: list[list[int]]) -> None:
        """Add a chunk of a request, `num_new` tokens from token `start` on. If it includes the last known token, a
        token is sampled. Tokens after the last known one are drafts.
        """
        batch, end = self.input, start + num_new
        batch.rows.append(request.row)
        batch.num_computed.append(start)
        batch.num_scheduled.append(num_new)
        batch.new_blocks.append(new_blocks)
        known = len(request.token_ids) + request.num_in_flight
        if end > known:
            batch.num_draft[len(self.requests)] = end - known
        if end >= known and request.sampling.max_tokens:
            batch.samples.append(len(self.requests))
            request.num_in_flight += 1
        self.requests.append(request)
        self.num_tokens += num_new

    def record_encoded(self, begin: float, end: float) -> None:
        """Record the times (time.time()) between which the step's images were encoded."""
        keys = {item.key for item in self.input.encode}
        for request in self.requests:
            if not keys.isdisjoint(item.key for item in request.media):
                request.encoded = (request.encoded[0] if request.encoded else begin, end)

    def add_decodes(self, requests: list[Request], new_blocks: dict[Request, list[list[int]]]) -> None:
        """Add one token of requests that decode without drafts."""
        batch, first, num = self.input, len(self.requests), len(requests)
        batch.rows.extend([request.row for request in requests])
        batch.num_computed.extend([request.num_computed_tokens for request in requests])
        batch.num_scheduled.extend([1] * num)
        batch.new_blocks.extend([new_blocks.get(request) or [] for request in requests])
        batch.samples.extend(range(first, first + num))
        for request in requests:
            request.num_in_flight += 1
        self.requests += requests
        self.num_tokens += num

    def ignore(self, position: int) -> None:
        """Discard the result of a batch position."""
        request = self.requests[position]
        self.ignored.add(position)
        if request.status is not Status.FINISHED and position in self.input.samples:
            request.num_in_flight -= 1

    def sampled(self, output: StepOutput) -> Iterator[tuple[int, Request, list[int], list[TokenLogprobs] | None]]:
        """Yield (batch position, request, token ids, log-probabilities) of requests that still wait for them."""
        logprobs = output.logprobs or [None] * len(output.token_ids)
        for i, token_ids, entries in zip(self.input.samples, output.token_ids, logprobs, strict=True):
            request = self.requests[i]
            if request.status is not Status.FINISHED and i not in self.ignored:
                yield i, request, token_ids, entries

    def unsampled(self) -> Iterator[tuple[int, Request]]:
        """Yield (batch position, request) of requests with max_tokens=0."""
        if len(self.input.samples) == len(self.requests):
            return
        for i, request in enumerate(self.requests):
            if request.status is not Status.FINISHED and not request.sampling.max_tokens and i not in self.ignored:
                yield i, request

    def new_prompt_logprobs(self, output: StepOutput) -> dict[Request, list[TokenLogprobs]]:
        """Return the prompt logprobs of this step that were not delivered before. After a preemption the worker sends
        the first ones again.

        The chunk of prompt tokens [a, b) predicts tokens a + 1 .. min(b, num_prompt_tokens - 1), which are entries a ..
        of the whole list.
        """
        entries_of = {}
        for i, entries in (output.prompt_logprobs or {}).items():
            request = self.requests[i]
            new = entries[max(request.num_prompt_logprobs - self.input.num_computed[i], 0) :]
            if new and request.status is not Status.FINISHED and i not in self.ignored:
                request.num_prompt_logprobs += len(new)
                entries_of[request] = new
        return entries_of

    def unfinished_prompts(self) -> Iterator[tuple[Request, int]]:
        """Yield requests that want reports of their prompts, and how many tokens of each are computed: not all, because
        the last chunk comes with a token.
        """
        for i, request in enumerate(self.requests):
            if not request.report_prefill or request.first_token_time or request.status is Status.FINISHED:
                continue
            num_tokens = self.input.num_computed[i] + self.input.num_scheduled[i]
            if i not in self.ignored and num_tokens < request.num_prompt_tokens:
                yield request, num_tokens
