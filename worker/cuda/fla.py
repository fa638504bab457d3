"""Delta rules of prompts by flash-linear-attention (https://github.com/fla-org/flash-linear-attention), if that package
is installed and, on this device and for these shapes, both correct and faster than our own kernel.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from quire.worker.layers.state import Span, StateStep
from quire.worker.layers.views import to_device

logger = logging.getLogger(__name__)

Rule = Callable[..., torch.Tensor]  # with the arguments of `delta_rule.gated_delta_rule`
SIZES = (64, 256, 1024)  # tokens of each of the two prompts that both are measured with
_TOLERANCE = 0.03  # relative to the largest entry: the package multiplies in 16 bits
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The inputs of the choice: key and value heads, their entries, and whether decays are per channel."""

    num_k: int
    num_v: int
    k_dim: int
    v_dim: int
    per_channel: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive requests of a step, from the first with several tokens to the last."""

    requests: slice
    tokens: slice
    starts: torch.Tensor  # [N + 1] int64, from 0
    host_starts: torch.Tensor
    several: torch.Tensor | None  # those of the N requests with several tokens; None: all


class DeltaRule:
    """`delta_rule.gated_delta_rule` of a model in `dtype`, 16 bits, for steps without stages: `own`, or the package for
    prompts from the length on at which it is faster. The first prompt of a shape measures both; at a server's start,
    that is the prompt that measures memory.
    """

    def __init__(
        self,
        own: Rule,
        dtype: torch.dtype,
        sizes: Sequence[int] = SIZES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own, self._dtype, self._sizes, self._clock = own, dtype, sizes, clock
        self._least: dict[Shape, float] = {}  # tokens per request from which on the package is used

    def __call__(self, *args: Any) -> torch.Tensor:
        *inputs, pages, step = args
        if not step.spans or (pages.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._own(*inputs, pages, step)
        first, last = step.spans[0], step.spans[-1]
        length = (last.stop - first.start) / (last.i + 1 - first.i)
        if length < self._sizes[0] or length < self._measured(inputs, pages.device):
            return self._own(*inputs, pages, step)
        return self._by_package(inputs, pages, step)

    def _by_package(self, inputs: Sequence[torch.Tensor], pages: torch.Tensor, step: StateStep) -> torch.Tensor:
        # the same tensors for all layers: the package prepares its tables by their identity
        piece = step.prepared.get("fla") or step.prepared.setdefault("fla", _piece(step))
        old = StateStep.load(pages, step.read[piece.requests], step.fresh[piece.requests])
        result, states = _call(self._dtype, *(x[piece.tokens] for x in inputs), old, piece.starts, piece.host_starts)
        out, write = result, step.write[piece.requests]
        if len(result) < len(inputs[0]) or piece.several is not None:
            # `old` is a copy: pages in which states of requests with one token change now were read before
            out = self._own(*inputs, pages, _without_spans(step))
            for span in step.spans:
                out[span.start : span.stop] = result[span.start - piece.tokens.start : span.stop - piece.tokens.start]
        if piece.several is not None:
            write, states = write[piece.several], states[piece.several]
        pages[write] = states
        return out

    # ---- measuring

    def _measured(self, inputs: Sequence[torch.Tensor], device: torch.device) -> float:
        q, _, v, g, _ = inputs
        shape = Shape(q.shape[1], v.shape[1], q.shape[2], v.shape[2], g.shape[2] > 1)
        if shape not in self._least:
            self._least[shape] = self._measure(shape, device)
        return self._least[shape]

    def _measure(self, shape: Shape, device: torch.device) -> float:
        name, least, times = "flash-linear-attention", math.inf, (0.0, 0.0)
        try:
            name = f"{name} {metadata.version('fla-core')}"
            for size in reversed(self._sizes):
                times = self._compare(shape, size, device)
                if times[0] >= times[1]:
                    break
                least = size
        except Exception as error:  # raised by the package, by Triton or by the driver
            logger.warning("%s is not used for %s: %s: %s", name, shape, type(error).__name__, error)
            return math.inf
        logger.info(
            "delta rule of prompts by %s (2 x %d tokens: %s %.3f ms, own kernel %.3f ms)",
            "our own kernel" if least == math.inf else f"{name} from {least} tokens on",
            size,
            name,
            *(1000 * seconds for seconds in times),
        )
        return least

    def _compare(self, shape: Shape, size: int, device: torch.device) -> tuple[float, float]:
        """Return seconds of the package and of the own kernel for two prompts of `size` tokens each. Raises ValueError
        if their results differ.
        """
        inputs, step = _example(shape, size, device)
        pages = torch.zeros(3, shape.num_v, shape.k_dim, shape.v_dim, device=device)
        starts = torch.tensor([0, size, 2 * size])
        zeros, on_device = torch.zeros_like(pages[1:]), starts.to(device)

        def package() -> tuple[torch.Tensor, torch.Tensor]:
            return _call(self._dtype, *inputs, zeros, on_device, starts)

        def own() -> torch.Tensor:
            return self._own(*inputs, pages, step)

        result, states = package()
        for what, mine, theirs in (("results", own(), result), ("states", pages[1:], states)):
            error = float((mine - theirs).abs().max() / mine.abs().max())
            if not error <= _TOLERANCE:
                raise ValueError(f"its {what} differ by {error:.2g} of the largest, limit {_TOLERANCE}")
        return self._time(package, device), self._time(own, device)

    def _time(self, run: Callable[[], object], device: torch.device) -> float:
        times = []
        for _ in range(_ROUNDS):
            _wait(device)
            start = self._clock()
            run()
            _wait(device)
            times.append(self._clock() - start)
        return min(times)


def _call(
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    host_starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the package's kernel. Returns results `[T, H, Dv]` float32 and the new states `[N, H, Dk, Dv]` float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    q, k, v, beta = (x.to(dtype)[None] for x in (q, k, v, beta))
    if g.shape[2] > 1:
        rule, repeats = chunk_kda, v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (q, k))
    else:
        rule, g = chunk_gated_delta_rule, g[..., 0]
    out, states = rule(
        q,
        k,
        v,
        g[None],
        beta,
        scale=1.0,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=starts,
        cu_seqlens_cpu=host_starts,
    )
    return out[0].float(), states


def _piece(step: StateStep) -> _Piece:
    first, last = step.spans[0], step.spans[-1]
    starts, several = [0], []
    for span in step.spans:
        while len(starts) <= span.i - first.i:  # requests with one token between them
            starts.append(starts[-1] + 1)
        several.append(span.i - first.i)
        starts.append(span.stop - first.start)
    return _Piece(
        slice(first.i, last.i + 1),
        slice(first.start, last.stop),
        to_device(starts, torch.int64, step.read.device),
        torch.tensor(starts),
        None if len(several) == len(starts) - 1 else to_device(several, torch.int64, step.read.device),
    )


def _without_spans(step: StateStep) -> StateStep:
    """Return the requests of `step` with one token."""
    return StateStep(step.read, step.write, step.fresh, step.starts, [], step.ones)


def _example(shape: Shape, size: int, device: torch.device) -> tuple[tuple[torch.Tensor, ...], StateStep]:
    random = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(2 * size, *sizes, generator=random, device=device)

    q, k = (torch.nn.functional.normalize(normal(shape.num_k, shape.k_dim), dim=-1) for _ in range(2))
    g = -torch.nn.functional.softplus(normal(shape.num_v, shape.k_dim if shape.per_channel else 1))
    inputs = q, k, normal(shape.num_v, shape.v_dim), g, normal(shape.num_v).sigmoid()
    pages, none = torch.tensor([1, 2], device=device), torch.empty(0, dtype=torch.int64, device=device)
    step = StateStep(
        pages,
        pages,
        torch.ones(2, dtype=torch.bool, device=device),
        torch.tensor([0, size, 2 * size], dtype=torch.int32, device=device),
        [Span(0, 0, size, True), Span(1, size, 2 * size, True)],
        (none, none),
    )
    return inputs, step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
