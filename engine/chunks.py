"""How many tokens of prompts run in a step."""

from __future__ import annotations

import math
import time

from quire.engine.encoder_cache import EncoderCache
from quire.engine.kv.manager import KVCacheManager
from quire.engine.request import Request
from quire.engine.step import Step

# prompt tokens with log-probabilities in a step: each costs a row of logits, and a request that arrives waits for the
# steps in flight. Each gets at least the second number, so that none holds up those after it.
SCORED_CHUNK, LEAST_SCORED = 256, 16
STEP_SECONDS = 0.12  # that a step should take while several tenants send requests
LEAST_TOKENS = 96  # of prompts in such a step: with fewer, a CPU computes much less per second
MIXED_SECONDS = 60.0  # after a request of another tenant than the one before, when the next one is likely
_NEW = 0.3  # weight of the newest step in the measured speed


class Chunks:
    """`threshold`: the most tokens of a prompt in a step that others share, 0 for no limit. `whole_images`: images are
    computed whole.
    """

    def __init__(self, kv: KVCacheManager, images: EncoderCache, threshold: int, whole_images: bool):
        self.kv, self.images, self.threshold, self.whole_images = kv, images, threshold, whole_images
        self._scored_room = SCORED_CHUNK  # of the step being scheduled

    def start_step(self) -> None:
        """Call this before scheduling a step."""
        self._scored_room = SCORED_CHUNK

    def size(self, request: Request, start: int, budget: int, room: int, alone: bool) -> int:
        """Number of tokens of a request, whose first `start` tokens are computed, to run in this step. 0 if it must
        wait for an image: `_end_at_images` says why.
        """
        num_new = min(request.num_tokens + request.num_in_flight - start, budget)
        if self.threshold and not alone:
            num_new = min(num_new, self.threshold)
        if request.sampling.prompt_logprobs is not None:
            num_new = min(num_new, max(self._scored_room, LEAST_SCORED))
            self._scored_room -= num_new
        end = self.kv.checkpoints.chunk_end(request, start, start + num_new)
        return (self._end_at_images(request, start, end, start + room) if request.media else end) - start

    def _end_at_images(self, request: Request, start: int, end: int, limit: int) -> int:
        """Return where a chunk of tokens [start, end) ends: before the first image that cannot be encoded in this step
        or, if images are computed whole, that does not fit into the chunk. Such an image may extend a chunk that begins
        with it, up to token `limit`.
        """
        for item in request.images(start, end):
            last = item.offset + item.length
            if self.whole_images and last > end:
                if item.offset > start or last > limit:
                    return max(item.offset, start)
                end = last
            if not self.images.request(item):
                return max(item.offset, start)
        return end


class Pace:
    """Shortens the steps of slow devices while several tenants send requests: one that arrives waits for the step in
    flight, which may be full of another's long prompt.
    """

    def __init__(self) -> None:
        self._last_end = 0.0  # time.monotonic() of the last results
        self._seconds = 0.0  # measured, per token of a prompt; 0: unknown
        self._tenant: str | None = None  # of the last request
        self._mixed_at = -math.inf  # time.monotonic() of the last request of another tenant than the one before

    def note_request(self, tenant: str) -> None:
        """A request arrives."""
        if self._tenant not in (None, tenant):
            self._mixed_at = time.monotonic()
        self._tenant = tenant

    def note_end(self, step: Step) -> None:
        """The results of a step are there."""
        ended = time.monotonic()
        if not step.input.encode:
            self.note_step(step.num_tokens, len(step.requests), ended - max(step.scheduled, self._last_end))
        self._last_end = ended

    def note_step(self, num_tokens: int, num_requests: int, seconds: float) -> None:
        """A step without images took this long."""
        if num_tokens >= max(LEAST_TOKENS // 2, 2 * num_requests):  # most of it was prompts
            new = seconds / num_tokens
            self._seconds = new if not self._seconds else (1 - _NEW) * self._seconds + _NEW * new

    def limit(self, token_budget: int) -> int:
        """The most tokens of prompts in the next step."""
        if not self._seconds or time.monotonic() - self._mixed_at > MIXED_SECONDS:
            return token_budget
        return min(max(int(STEP_SECONDS / self._seconds), LEAST_TOKENS), token_budget)
