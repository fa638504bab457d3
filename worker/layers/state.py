"""The recurrent states of a layer, and how the tokens of a step pass them.

A state has a fixed size per request. A step reads it from one page and writes it to another, or to the same
(`engine/kv/manager.py`). Page 0 is the null page: a request without computed tokens reads it and begins with zeros
instead, and padding rows write to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

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
    # of a step that verifies drafts: (indices of tokens, how they pass), one after another. Every draft passes alone,
    # and leaves the state before the next one in a page of its own, because it may be rejected.
    stages: list[tuple[torch.Tensor, StateStep]] = field(default_factory=list)

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

    def __init__(self) -> None:
        # batch position of a request with drafts -> the pages for the states after its tokens but the last
        self.spares: Mapping[int, Sequence[int]] = {}

    @classmethod
    def supports(cls, spec: object) -> str | None:
        return "has no keys and values"

    def build(self, meta: AttentionMetadata) -> None:
        read, write = meta.block_table[:, :2].t().long().contiguous()
        starts = meta.query_start_loc
        fresh = meta.seq_lens == starts.diff()
        if meta.max_query_len == 1:
            meta.extra = StateStep(read, write, fresh, starts, [], None)
            return
        begins, lengths = meta.host_lengths()
        counts = [stop - start for start, stop in pairwise(begins)]
        spans, ones = _spans(counts, [n == m for n, m in zip(lengths, counts)], read.device)
        meta.extra = StateStep(read, write, fresh, starts, spans, ones)
        if self.spares:
            meta.extra.stages = _stages(meta.extra, begins, self.spares)

    def attend(self, call: object) -> torch.Tensor:
        raise AssertionError("a layer with a state does not attend")


def _spans(
    counts: Sequence[int], fresh: Sequence[bool], device: torch.device
) -> tuple[list[Span], tuple[torch.Tensor, torch.Tensor]]:
    """The requests of several tokens, and (batch positions, tokens) of those with one."""
    begins = [0, *accumulate(counts)]
    spans = [Span(i, begins[i], begins[i + 1], fresh[i]) for i, count in enumerate(counts) if count > 1]
    single = [i for i, count in enumerate(counts) if count == 1]
    both = to_device([single, [begins[i] for i in single]], torch.int64, device)
    return spans, (both[0], both[1])


def _stages(
    step: StateStep, begins: Sequence[int], spares: Mapping[int, Sequence[int]]
) -> list[tuple[torch.Tensor, StateStep]]:
    """The stages of a step: first all tokens that are known, then the first drafts, and so on. Waits for the device."""
    reads, writes, fresh, device = step.read.tolist(), step.write.tolist(), step.fresh.tolist(), step.read.device
    requests = range(len(reads))
    counts = [1 if i in spares else begins[i + 1] - begins[i] for i in requests]
    tokens = [token for i in requests for token in range(begins[i], begins[i] + counts[i])]
    first = [spares[i][0] if i in spares else writes[i] for i in requests]
    stages = [_stage(tokens, counts, reads, first, fresh, device)]
    for place in range(1, max(map(len, spares.values())) + 1):
        mine = [i for i, pages in spares.items() if len(pages) >= place]
        stages.append(
            _stage(
                [begins[i] + place for i in mine],
                [1] * len(mine),
                [spares[i][place - 1] for i in mine],
                [spares[i][place] if len(spares[i]) > place else writes[i] for i in mine],
                [False] * len(mine),
                device,
            )
        )
    return stages


def _stage(
    tokens: list[int],
    counts: list[int],
    reads: list[int],
    writes: list[int],
    fresh: list[bool],
    device: torch.device,
) -> tuple[torch.Tensor, StateStep]:
    starts = to_device([0, *accumulate(counts)], torch.int32, device)
    spans, ones = _spans(counts, fresh, device)
    read, write, index = (to_device(ids, torch.int64, device) for ids in (reads, writes, tokens))
    is_fresh = to_device(fresh, torch.bool, device)
    return index, StateStep(read, write, is_fresh, starts, spans, ones if spans else None)


def by_stages(*tokens: int) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Let an operation on the states of a step, whose arguments number `tokens` are `[T, ..]`, follow its stages."""

    def follow(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(op)
        def run(*args: object, **others: object) -> torch.Tensor:
            step = next(one for one in args if isinstance(one, StateStep))
            if not step.stages:
                return op(*args, **others)
            out = None
            for index, part in step.stages:
                mine = [part if one is step else one[index] if i in tokens else one for i, one in enumerate(args)]
                result = op(*mine, **others)
                out = result.new_empty(len(args[tokens[0]]), *result.shape[1:]) if out is None else out
                out[index] = result
            return out

        return run

    return follow
