"""The recurrent states of a layer, and how the tokens of a step pass them.

A state has a fixed size per request. A step reads it from one page and writes it to another, or to the same
(`engine/kv/manager.py`). Page 0 is the null page: a request without computed tokens reads it and begins with zeros
instead, and padding rows write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from quire.worker.attention.base import AttentionBackend, AttentionMetadata
from quire.worker.cache.spec import State
from quire.worker.layers.views import to_device

# Maps states [R, ..] and one token of each request, tensors [R, ..], to results [R, ..] and the new states.
OneToken = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# Maps the state [..] and some tokens of one request, tensors [n, ..], to results [n, ..] and the new state.
ManyTokens = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RecurrentState(nn.Module):
    """The float32 states of one layer: `worker/cache/allocation.py` binds `pages`, a tensor `[P, *shape]` per shape."""

    def __init__(self, layer_index: int, shapes: tuple[tuple[int, ...], ...]):
        super().__init__()
        self.layer_index, self.shapes = layer_index, shapes
        self.cache_group = 0  # index of its metadata in the step's groups
        self.pages: list[torch.Tensor] | None = None

    @property
    def cache_spec(self) -> State:
        return State(self.shapes)

    def step(self, attn: tuple[AttentionMetadata, ...]) -> StateStep:
        """How the tokens of the step pass this layer."""
        return attn[self.cache_group].extra


@dataclass(slots=True)
class Span:
    """Tokens [start, stop) of the step, of the request at batch position `i`; `fresh`: its first ones."""

    i: int
    start: int
    stop: int
    fresh: bool


@dataclass(slots=True)
class StateStep:
    """The pages and tokens of a step's R requests, the same for all layers of a group."""

    read: torch.Tensor  # [R] int64
    write: torch.Tensor  # [R] int64
    fresh: torch.Tensor  # [R] bool: whether the request has no computed tokens
    starts: torch.Tensor  # [R + 1] int32: tokens of request i are starts[i] : starts[i + 1]
    spans: list[Span]  # requests with several tokens
    # batch positions and tokens of the requests with one token, None: these are all
    ones: tuple[torch.Tensor, torch.Tensor] | None

    def advance(self, pages: torch.Tensor, one: OneToken, many: ManyTokens, *inputs: torch.Tensor) -> torch.Tensor:
        """Pass the step's tokens, whose `inputs` are `[T, ..]`, through the states in `pages`. Returns `[T, ..]`."""
        if self.ones is None:
            out, states = one(self._load(pages, self.read, self.fresh), *inputs)
            pages[self.write] = states
            return out
        out, (requests, tokens) = None, self.ones
        if len(requests):
            states = self._load(pages, self.read[requests], self.fresh[requests])
            results, states = one(states, *(x[tokens] for x in inputs))
            pages[self.write[requests]] = states
            out = results.new_empty(len(inputs[0]), *results.shape[1:])
            out[tokens] = results
        for span in self.spans:
            at = slice(span.i, span.i + 1)
            state = torch.zeros_like(pages[0]) if span.fresh else pages[self.read[at]][0]
            result, state = many(state, *(x[span.start : span.stop] for x in inputs))
            pages[self.write[at]] = state[None]
            out = result.new_empty(len(inputs[0]), *result.shape[1:]) if out is None else out
            out[span.start : span.stop] = result
        return out

    @staticmethod
    def _load(pages: torch.Tensor, read: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        states = pages[read]
        return states.masked_fill_(fresh.view(-1, *[1] * (states.dim() - 1)), 0.0)


class StateSteps(AttentionBackend):
    """Stands for the attention backend in the metadata of a state group: `build` makes the group's `StateStep`."""

    name = "state"
    graph_safe = True

    @classmethod
    def supports(cls, spec: object) -> str | None:
        return "has no keys and values"

    def build(self, meta: AttentionMetadata) -> None:
        read, write = meta.block_table[:, :2].t().long().contiguous()
        starts = meta.query_start_loc
        fresh = meta.seq_lens == starts.diff()
        spans, ones = [], None
        if meta.max_query_len > 1:
            begins, lengths = meta.host_lengths()
            counts = [stop - start for start, stop in pairwise(begins)]
            spans = [
                Span(i, begins[i], begins[i + 1], lengths[i] == count) for i, count in enumerate(counts) if count > 1
            ]
            single = [i for i, count in enumerate(counts) if count == 1]
            both = to_device([single, [begins[i] for i in single]], torch.int64, read.device)
            ones = both[0], both[1]
        meta.extra = StateStep(read, write, fresh, starts, spans, ones)

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("a layer with a state does not attend")
