"""Attention of a step in which tokens of outputs attend to the whole prompt and to the last tokens of the output only
(Unlimited-OCR's reference sliding window).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.worker.attention.base import AttentionBackend, AttentionCall, GroupedMetadata, StepBackend
from quire.worker.attention.torch_paged import Plan, attend_output
from quire.worker.messages import CacheGroup


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """Tokens [start, stop) of the request at batch position `i`, whose prompt has `num_prompt` tokens."""

    i: int
    start: int
    stop: int
    num_prompt: int


class OutputWindow(StepBackend):
    """`inner`, whose results for `tokens`, which do not see all tokens before them, are replaced. Made for one step."""

    name = "output_window"

    def __init__(self, inner: AttentionBackend, tokens: list[OutputTokens], window: int):
        super().__init__(inner)
        self.tokens, self.window = tokens, window
        self._plan = Plan()  # for all layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        out = self.inner.attend(call)
        starts, lengths = meta.host_lengths()
        for one in self.tokens:
            origin = starts[one.i + 1] - lengths[one.i]  # index in the step of the request's token 0
            tokens = slice(origin + one.start, origin + one.stop)
            out[tokens] = attend_output(
                self._plan,
                (one.i, one.start, one.stop, one.num_prompt),
                q[tokens],
                k_cache,
                v_cache,
                meta.block_table,
                call.scale,
                self.window,
                call.soft_cap,
                call.sinks,
            )
        return out


def limit_outputs(
    attn: GroupedMetadata,
    groups: Sequence[CacheGroup],
    num_computed: Sequence[int],
    num_scheduled: Sequence[int],
    num_prompt: Sequence[int],
) -> None:
    """Give groups with an output window a backend that applies it, if some tokens of the step do not see all tokens
    before them. Sequences have one entry per request of the step.
    """
    for meta, group in zip(attn, groups):
        if group.shares_outputs:
            continue
        tokens = []
        for i, (computed, scheduled, prompt) in enumerate(zip(num_computed, num_scheduled, num_prompt)):
            first = max(computed, prompt + group.window)  # the first one that does not see the first output token
            if first < computed + scheduled:
                tokens.append(OutputTokens(i, first, computed + scheduled, prompt))
        if tokens:
            meta.backend = OutputWindow(meta.backend, tokens, group.window)
