"""The recurrent states of a layer, and how a step's tokens pass through them.

A state has a fixed size per request. A step reads it from one page and writes it to another, or to the same
(`engine/kv/manager.py`). Page 0 is the null page: a request without computed tokens reads it and begins with zeros
instead, and padding rows write to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from quire.worker.attention.base import AttentionBackend, AttentionMetadata
from quire.worker.layers.views import to_device
from quire.worker.spec.cache import State

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
        """Return the pages and tokens of the step for this layer."""
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
    # (the tokens, how they pass), one after another, of a step in which requests leave states between their
    # tokens: before each draft, which may be rejected, and at the checkpoints of prompts.
    stages: list[tuple[slice | torch.Tensor, StateStep]] = field(default_factory=list)
    prepared: dict[str, Any] = field(default_factory=dict)  # kept by kernels in this step for the other layers

    def advance(self, pages: torch.Tensor, one: OneToken, many: ManyTokens, *inputs: torch.Tensor) -> torch.Tensor:
        """Pass the step's tokens, whose `inputs` are `[T, ..]`, through the states in `pages`. Returns `[T, ..]`."""
        if self.ones is None:
            out, states = one(self.load(pages, self.read, self.fresh), *inputs)
            pages[self.write] = states
            return out
        out, (requests, tokens) = None, self.ones
        if len(requests):
            states = self.load(pages, self.read[requests], self.fresh[requests])
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
    def load(pages: torch.Tensor, read: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        states = pages[read]
        return states.masked_fill_(fresh.view(-1, *[1] * (states.dim() - 1)), 0.0)


class PieceEnd:
    """Stands for the step while a forward pass is recorded in pieces (`batch/mixed_graphs.py`): an operation on its
    states ends a piece. `take` gets (what it is, the operation of metadata, its inputs `[T, ..]` and a buffer, these
    inputs, shape and dtype of a token's result) and returns that buffer.
    """

    def __init__(self, take: Callable[..., torch.Tensor]) -> None:
        self._take = take

    def end(
        self,
        op: Callable[..., torch.Tensor],
        args: Sequence[object],
        others: Mapping[str, object],
        tokens: Sequence[int],
        like: int,
    ) -> torch.Tensor:
        """End a piece before `op`, which follows stages, with the arguments of `by_stages`."""

        # without the inputs, whose memory later pieces may use
        kept = [None if i in tokens else one for i, one in enumerate(args)]

        def run(meta: AttentionMetadata, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            mine = dict(zip(tokens, inputs))
            return op(*[meta.extra if one is self else mine.get(i, one) for i, one in enumerate(kept)], **others)

        return self._take(op, run, [args[i] for i in tokens], args[like].shape[1:], torch.float32)


class StateSteps(AttentionBackend):
    """Takes the place of the attention backend in the metadata of a state group: `build` makes the group's `StateStep`.
    """

    name = "state"
    graph_safe = True

    def __init__(self) -> None:
        # batch position -> where the request also leaves its state: (number of its tokens before, page), ascending
        self.cuts: Mapping[int, Sequence[tuple[int, int]]] = {}

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
        if self.cuts:
            meta.extra.stages = _stages(meta.extra, begins, [n == m for n, m in zip(lengths, counts)], self.cuts)

    def attend(self, call: object) -> torch.Tensor:
        raise AssertionError("a layer with a state does not attend")


def _spans(
    counts: Sequence[int], fresh: Sequence[bool], device: torch.device
) -> tuple[list[Span], tuple[torch.Tensor, torch.Tensor]]:
    """Return the requests of several tokens, and (batch positions, tokens) of those with one."""
    begins = [0, *accumulate(counts)]
    spans = [Span(i, begins[i], begins[i + 1], fresh[i]) for i, count in enumerate(counts) if count > 1]
    single = [i for i, count in enumerate(counts) if count == 1]
    both = to_device([single, [begins[i] for i in single]], torch.int64, device)
    return spans, (both[0], both[1])


def _stages(
    step: StateStep, begins: Sequence[int], fresh: Sequence[bool], cuts: Mapping[int, Sequence[tuple[int, int]]]
) -> list[tuple[slice | torch.Tensor, StateStep]]:
    """Return the stages of a step: the tokens of each request up to its first cut or, without any, all of them; then
    those of the requests with a cut up to their second one, and so on. Tokens in a row are a slice, which copies
    nothing.

    E.g. 5 tokens with cuts after 2 and 4, and 3 without: [0, 1, 5, 6, 7], [2, 3], [4].
    """
    device, stages = step.read.device, []
    for place in range(max(map(len, cuts.values())) + 1):
        mine = [i for i in range(len(begins) - 1) if not place or len(cuts.get(i, ())) >= place]
        spans = [_between(begins, i, cuts.get(i, ()), place) for i in mine]
        counts = [stop - start for start, stop in spans]
        is_fresh = list(fresh) if not place else [False] * len(mine)
        at = [(j, cuts[i][place][1]) for j, i in enumerate(mine) if len(cuts.get(i, ())) > place]
        index = _tokens(spans, device)
        starts = to_device([0, *accumulate(counts)], torch.int32, device)
        if place:
            both = to_device([mine, [cuts[i][place - 1][1] for i in mine]], torch.int64, device)
            read, write = both[1], step.write[both[0]]
        else:
            read, write = step.read, step.write.clone()
        if at:
            both = to_device([list(column) for column in zip(*at)], torch.int64, device)
            write[both[0]] = both[1]
        many, ones = _spans(counts, is_fresh, device)
        states = StateStep(read, write, to_device(is_fresh, torch.bool, device), starts, many, ones if many else None)
        stages.append((index, states))
    return stages


def _tokens(spans: Sequence[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    """Return the tokens of spans, of which some may be empty."""
    spans = [span for span in spans if span[0] < span[1]]
    if all(one[1] == other[0] for one, other in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1]) if spans else slice(0, 0)
    return to_device([token for span in spans for token in range(*span)], torch.int64, device)


def _between(begins: Sequence[int], i: int, cuts: Sequence[tuple[int, int]], place: int) -> tuple[int, int]:
    """Return tokens of the request at position i from its cut number `place` - 1 up to the next one."""
    start = begins[i] + (cuts[place - 1][0] if place else 0)
    return start, begins[i] + cuts[place][0] if place < len(cuts) else begins[i + 1]


def by_stages(*tokens: int, like: int = 0) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Let an operation on the states of a step, whose arguments number `tokens` are `[T, ..]`, follow its stages. Its
    result is float32, of the shape of argument number `like`.
    """

    def follow(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(op)
        def run(*args: object, **others: object) -> torch.Tensor:
            step = next(one for one in args if isinstance(one, StateStep | PieceEnd))
            if isinstance(step, PieceEnd):
                return step.end(run, args, others, tokens, like)
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
