"""Attention of a step in which the tokens of some images attend to each other in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.worker.attention.base import AttentionBackend, AttentionCall, StepBackend
from quire.worker.attention.torch_paged import Plan, attend_span


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens [start, stop) of the request at batch position `i`, all of which are in this step."""

    i: int
    start: int
    stop: int


class SpanAttention(StepBackend):
    """`inner`, whose results for the tokens of `spans` are replaced: they also see the later tokens of their span. A
    window limits only how far they see back.

    The spans are computed one by one, so that other tokens get the same bits as without them. Made for one step.
    """

    name = "image_spans"

    def __init__(self, inner: AttentionBackend, spans: list[ImageSpan]):
        super().__init__(inner)
        self.spans = spans
        self._plan = Plan()  # for all layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        out = self.inner.attend(call)
        starts, lengths = meta.host_lengths()
        for span in self.spans:
            # index in the step of the request's token 0
            origin = starts[span.i + 1] - lengths[span.i]
            tokens = slice(origin + span.start, origin + span.stop)
            out[tokens] = attend_span(
                self._plan,
                (span.i, span.start, span.stop),
                q[tokens],
                k_cache,
                v_cache,
                meta.block_table,
                call.scale,
                call.sliding_window,
                call.soft_cap,
                call.sinks,
            )
        return out
