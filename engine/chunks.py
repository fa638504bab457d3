"""The number of tokens of a prompt that run in a step."""

from __future__ import annotations

from quire.engine.encoder_cache import EncoderCache
from quire.engine.kv.manager import KVCacheManager
from quire.engine.request import Request

# maximum prompt tokens with log-probabilities in a step: each costs a row of logits, and an arriving request waits for
# the steps in flight. Each request gets at least LEAST_SCORED, so that it does not hold up those after it.
SCORED_CHUNK, LEAST_SCORED = 256, 16


class Chunks:
    """The sizes of prompt chunks. `threshold`: maximum tokens of a prompt in a step that other requests share, 0 for no
    limit. `whole_images`: images are computed whole.
    """

    def __init__(self, kv: KVCacheManager, images: EncoderCache, threshold: int, whole_images: bool):
        self.kv, self.images, self.threshold, self.whole_images = kv, images, threshold, whole_images
        self._scored_room = SCORED_CHUNK  # for the step being scheduled

    def start_step(self) -> None:
        """Call this before scheduling a step."""
        self._scored_room = SCORED_CHUNK

    def size(self, request: Request, start: int, budget: int, room: int, alone: bool) -> int:
        """Return the number of tokens of a request to run in this step after its first `start`, which are computed. 0
        if the request must wait for an image (`_end_at_images`).
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
