"""Recurrent states in Triton: the causal convolution, the gated delta rule, linear attention and the selective scan.

Requests with one token update their states by the formula, those with several in chunks of products. Both kernels are
launched over all requests, and each skips those of the other. A program reads the part of the page that it writes, so
that a state may be updated in place. The torch twins, with the same arguments, are in worker/layers: short_conv.py,
delta_rule.py, linear_attention.py, selective_scan.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.worker.layers.state import StateStep, by_stages

_TOKENS = 16  # in a convolution, at a time
_DELTA_CHUNK = 16  # tokens: its triangular system is solved row by row
_LINEAR_CHUNK = 32
_MOST_STATE = 8192  # entries of a head's state in a program with one token
_PIECE = 32  # entries of keys that a program with several reads at a time


@by_stages(0)
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    step: StateStep,
    silu: bool = False,
    fixed_order: bool = False,
) -> torch.Tensor:
    """See `short_conv.causal_conv`; with `fixed_order` every step has one tile of tokens."""
    x = _aligned(x if x.stride(1) == 1 else x.contiguous())
    width, channels = weight.shape
    out, block = torch.empty(x.shape, dtype=torch.float32, device=x.device), min(64, triton.next_power_of_2(channels))
    tokens = 1 if step.ones is None and not fixed_order else _TOKENS
    _conv_kernel[(len(step.read), triton.cdiv(channels, block))](
        x, weight, weight if bias is None else bias, pages, step.read, step.write, step.fresh, step.starts, out,
        x.stride(0), channels, WIDTH=width, BIASED=bias is not None, SILU=silu, TOKENS=tokens, BLOCK=block,
        num_warps=2,
    )  # fmt: skip
    return out


@by_stages(0, 1, 2, 3, 4, like=2)
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    pages: torch.Tensor,
    step: StateStep,
    fixed_order: bool = False,
) -> torch.Tensor:
    """See `delta_rule.gated_delta_rule`; with `fixed_order` tokens pass the state one by one."""
    return _by_heads(q, k, v, g, beta.contiguous(), pages, step, 1 if fixed_order else _DELTA_CHUNK)


@by_stages(0, 1, 2, 3, like=2)
def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    pages: torch.Tensor,
    step: StateStep,
    fixed_order: bool = False,
) -> torch.Tensor:
    """See `linear_attention.linear_attention`; `fixed_order` is as in `gated_delta_rule`."""
    return _by_heads(q, k, v, g[..., None], None, pages, step, 1 if fixed_order else _LINEAR_CHUNK)


def _by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    pages: torch.Tensor,
    step: StateStep,
    chunk: int,
) -> torch.Tensor:
    q, k, v, g = _heads(q), _heads(k), _heads(v), _aligned(g.contiguous())
    beta = None if beta is None else _aligned(beta)
    heads, dk, dv = pages.shape[1:]
    rows = max(triton.next_power_of_2(dk), 16)
    columns = min(max(triton.next_power_of_2(dv), 16), max(_MOST_STATE // rows, 16))
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    args = q, k, v, g, g if beta is None else beta, pages, step.read, step.write, step.fresh, step.starts, out
    numbers = q.stride(0), k.stride(0), v.stride(0), heads, heads // q.shape[1], dk, dv
    sizes = {"DELTA": beta is not None, "PER_CHANNEL": g.shape[2] > 1}
    one_by_one = chunk == 1
    if one_by_one or step.ones is None or len(step.ones[0]):
        grid, warps = (len(step.read), heads, triton.cdiv(dv, columns)), 4 if rows * columns <= 4096 else 8
        _token_kernel[grid](*args, *numbers, **sizes, ALL=one_by_one, DK=rows, DV=columns, num_warps=warps)
    if step.spans and not one_by_one:
        columns = min(max(triton.next_power_of_2(dv), 16), 64)
        piece = min(rows, _PIECE // 2 if sizes["PER_CHANNEL"] else _PIECE)  # their decays take registers, too
        grid = len(step.read), heads, triton.cdiv(dv, columns)
        _chunk_kernel[grid](*args, *numbers, **sizes, PIECE=piece, DV=columns, CHUNK=chunk, num_warps=4)
    return out


@by_stages(0, 1, 3, 4)
def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    pages: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """See `selective_scan.selective_scan`."""
    x, dt, a, b, c = (_aligned(one.contiguous()) for one in (x, dt, a, b, c))
    channels, entries = a.shape
    padded = triton.next_power_of_2(entries)
    block = max(1024 // padded, 1)
    out = torch.empty_like(x)
    _scan_kernel[(len(step.read), triton.cdiv(channels, block))](
        x, dt, a, b, c, pages, step.read, step.write, step.fresh, step.starts, out, channels, entries, BLOCK=block,
        ENTRIES=padded, num_warps=4,
    )  # fmt: skip
    return out


def _heads(x: torch.Tensor) -> torch.Tensor:
    """Return x `[T, H, D]` with its heads in a row."""
    return _aligned(x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous())


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, copied if it begins at an odd address, as some tokens of a step may: that takes another variant."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


# parts of a step's tensors, which begin anywhere in them; specializing on that would recompile the kernel
_OF_STEP = ["reads", "writes", "is_fresh", "starts"]


@triton.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=_OF_STEP)
def _conv_kernel(
    x, weight, bias, pages, reads, writes, is_fresh, starts, out, x_stride, channels, WIDTH: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    start, stop = tl.load(starts + i), tl.load(starts + i + 1)
    size = (WIDTH - 1) * channels
    old = pages + tl.load(reads + i) * size + column
    new = pages + tl.load(writes + i) * size + column
    known = tl.load(is_fresh + i) == 0
    for first in range(start, stop, TOKENS):
        token = first + tl.arange(0, TOKENS)
        y = tl.zeros([TOKENS, BLOCK], tl.float32)
        if BIASED:
            y += tl.load(bias + column, inside, 0.0)[None]
        for k in tl.static_range(WIDTH):
            at = token - (WIDTH - 1) + k
            here = (at >= start) & (token < stop)
            row = at.to(tl.int64)[:, None] * x_stride + column[None]
            value = tl.load(x + row, here[:, None] & inside[None], 0.0).to(tl.float32)
            before = (at < start) & (token < stop) & known
            place = old[None] + (at - start + WIDTH - 1)[:, None] * channels
            value += tl.load(place, before[:, None] & inside[None], 0.0)
            y += value * tl.load(weight + k * channels + column, inside, 0.0)[None]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        tl.store(out + token.to(tl.int64)[:, None] * channels + column[None], y, (token < stop)[:, None] & inside[None])
    # ascending, so that a state in place is read before it is overwritten: each thread has its channels
    for k in tl.static_range(WIDTH - 1):
        at = stop - (WIDTH - 1) + k
        value = tl.load(x + at.to(tl.int64) * x_stride + column, inside & (at >= start), 0.0).to(tl.float32)
        value += tl.load(old + (at - start + WIDTH - 1) * channels, inside & (at < start) & known, 0.0)
        tl.store(new + k * channels, value, inside)


@triton.jit(do_not_specialize_on_alignment=_OF_STEP)
def _token_kernel(
    q, k, v, g, beta, pages, reads, writes, is_fresh, starts, out, q_stride, k_stride, v_stride, heads, repeats, dk, dv,
    DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, ALL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Compute the one token of a request, or with ALL its tokens one by one: S = e^g S; S += k (x) v or, by the delta
    rule, k (x) beta (v - k S); o = q S.
    """
    i, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + i), tl.load(starts + i + 1)
    if (stop - start == 1) | (ALL & (stop > start)):
        row, column = tl.arange(0, DK), tl.program_id(2) * DV + tl.arange(0, DV)
        in_row, in_column = row < dk, column < dv
        inside = in_row[:, None] & in_column[None]
        place = head * dk * dv + row[:, None] * dv + column[None]
        known = tl.load(is_fresh + i) == 0
        state = tl.load(pages + tl.load(reads + i) * heads * dk * dv + place, inside & known, 0.0)
        for offset in range(0, stop - start):
            t = (start + offset).to(tl.int64)
            key = tl.load(k + t * k_stride + head // repeats * dk + row, in_row, 0.0)
            query = tl.load(q + t * q_stride + head // repeats * dk + row, in_row, 0.0)
            added = tl.load(v + t * v_stride + head * dv + column, in_column, 0.0)
            if PER_CHANNEL:
                state = state * tl.exp(tl.load(g + (t * heads + head) * dk + row, in_row, 0.0))[:, None]
            else:
                state = state * tl.exp(tl.load(g + t * heads + head))
            if DELTA:
                added = (added - tl.sum(state * key[:, None], 0)) * tl.load(beta + t * heads + head)
            state += key[:, None] * added[None]
            tl.store(out + (t * heads + head) * dv + column, tl.sum(state * query[:, None], 0), in_column)
        tl.store(pages + tl.load(writes + i) * heads * dk * dv + place, state, inside)


@triton.jit(do_not_specialize_on_alignment=_OF_STEP)
def _chunk_kernel(
    q, k, v, g, beta, pages, reads, writes, is_fresh, starts, out, q_stride, k_stride, v_stride, heads, repeats, dk, dv,
    DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr, PIECE: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute the tokens of a request with several, CHUNK at a time: see `delta_many` and `linear_many`.

    A state and a chunk's queries and keys do not fit into registers: they are read PIECE entries of a key at a time,
    and the state stays in the page that is written.
    """
    i, head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + i), tl.load(starts + i + 1)
    if stop - start > 1:
        piece, index = tl.arange(0, PIECE), tl.arange(0, CHUNK)
        column = tl.program_id(2) * DV + tl.arange(0, DV)
        in_column = column < dv
        old = pages + (tl.load(reads + i) * heads + head) * dk * dv
        new = pages + (tl.load(writes + i) * heads + head) * dk * dv
        known = tl.load(is_fresh + i) == 0
        for d in range(0, dk, PIECE):
            row = d + piece
            inside = (row < dk)[:, None] & in_column[None]
            place = row[:, None] * dv + column[None]
            tl.store(new + place, tl.load(old + place, inside & known, 0.0), inside)
        tl.debug_barrier()
        for first in range(start, stop, CHUNK):
            token = (first + index).to(tl.int64)
            here = token < stop
            y = tl.zeros([CHUNK, DV], tl.float32)
            seen = tl.zeros([CHUNK, DV], tl.float32)
            kk = tl.zeros([CHUNK, CHUNK], tl.float32)
            qk = tl.zeros([CHUNK, CHUNK], tl.float32)
            for d in range(0, dk, PIECE):
                row = d + piece
                of_keys = here[:, None] & (row < dk)[None]
                inside = (row < dk)[:, None] & in_column[None]
                keys = tl.load(k + token[:, None] * k_stride + head // repeats * dk + row[None], of_keys, 0.0)
                queries = tl.load(q + token[:, None] * q_stride + head // repeats * dk + row[None], of_keys, 0.0)
                state = tl.load(new + row[:, None] * dv + column[None], inside, 0.0)
                if PER_CHANNEL:
                    rates = tl.load(g + (token * heads + head)[:, None] * dk + row[None], of_keys, 0.0)
                    decay = tl.cumsum(rates, 0)
                    for j in range(CHUNK):  # e^-decay alone may be infinite
                        mine = index == j
                        key = tl.sum(tl.where(mine[:, None], keys, 0.0), 0)
                        then = tl.sum(tl.where(mine[:, None], decay, 0.0), 0)
                        between = tl.exp(tl.minimum(decay - then[None], 0.0)) * key[None]
                        qk += tl.where(mine[None], tl.sum(queries * between, 1)[:, None], 0.0)
                        if DELTA:
                            kk += tl.where(mine[None], tl.sum(keys * between, 1)[:, None], 0.0)
                    queries, keys = queries * tl.exp(decay), keys * tl.exp(decay)
                else:
                    qk += tl.dot(queries, tl.trans(keys), input_precision="tf32x3")
                    if DELTA:
                        kk += tl.dot(keys, tl.trans(keys), input_precision="tf32x3")
                y += tl.dot(queries, state, input_precision="tf32x3")
                if DELTA:
                    seen += tl.dot(keys, state, input_precision="tf32x3")
            rates = tl.zeros([CHUNK], tl.float32)
            if not PER_CHANNEL:
                rates = tl.load(g + token * heads + head, here, 0.0)
            decay = tl.cumsum(rates, 0)
            whole = tl.sum(rates, 0)
            if not PER_CHANNEL:
                between = tl.exp(tl.minimum(decay[:, None] - decay[None], 0.0))
                kk, qk = kk * between, qk * between
                y, seen = y * tl.exp(decay)[:, None], seen * tl.exp(decay)[:, None]
            values = tl.load(
                v + token[:, None] * v_stride + head * dv + column[None], here[:, None] & in_column[None], 0.0
            )
            if DELTA:
                strength = tl.load(beta + token * heads + head, here, 0.0)[:, None]
                # the inverse of I + tril(strength kk, -1), row by row from -tril(..)
                system = tl.where(index[:, None] > index[None], -strength * kk, 0.0)
                inverse = system
                for j in range(1, CHUNK):
                    own = tl.sum(tl.where((index == j)[:, None], system, 0.0), 0)
                    own += tl.sum(own[:, None] * inverse, 0)
                    inverse = tl.where((index == j)[:, None], own[None], inverse)
                inverse += tl.where(index[:, None] == index[None], 1.0, 0.0)
                values = tl.dot(inverse, strength * (values - seen), input_precision="tf32x3")
            y += tl.dot(tl.where(index[:, None] >= index[None], qk, 0.0), values, input_precision="tf32x3")
            tl.store(out + (token * heads + head)[:, None] * dv + column[None], y, here[:, None] & in_column[None])
            tl.debug_barrier()  # all have read the state
            for d in range(0, dk, PIECE):
                row = d + piece
                of_keys = here[:, None] & (row < dk)[None]
                inside = (row < dk)[:, None] & in_column[None]
                keys = tl.load(k + token[:, None] * k_stride + head // repeats * dk + row[None], of_keys, 0.0)
                state = tl.load(new + row[:, None] * dv + column[None], inside, 0.0)
                if PER_CHANNEL:
                    steps = tl.load(g + (token * heads + head)[:, None] * dk + row[None], of_keys, 0.0)
                    total = tl.sum(steps, 0)
                    keys = keys * tl.exp(total[None] - tl.cumsum(steps, 0))
                    state = state * tl.exp(total)[:, None]
                else:
                    keys = keys * tl.exp(whole - decay)[:, None]
                    state = state * tl.exp(whole)
                state += tl.dot(tl.trans(keys), values, input_precision="tf32x3")
                tl.store(new + row[:, None] * dv + column[None], state, inside)
            tl.debug_barrier()


@triton.jit(do_not_specialize_on_alignment=_OF_STEP)
def _scan_kernel(
    x, dt, a, b, c, pages, reads, writes, is_fresh, starts, out, channels, entries, BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    channel, entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ENTRIES)
    in_channel, in_entry = channel < channels, entry < entries
    inside = in_channel[:, None] & in_entry[None]
    place = channel[:, None] * entries + entry[None]
    known = tl.load(is_fresh + i) == 0
    state = tl.load(pages + tl.load(reads + i) * channels * entries + place, inside & known, 0.0)
    rates = tl.load(a + place, inside, 0.0)
    start = tl.load(starts + i).to(tl.int64)
    for offset in range(0, tl.load(starts + i + 1) - tl.load(starts + i)):
        t = start + offset
        time = tl.load(dt + t * channels + channel, in_channel, 0.0)
        added = time * tl.load(x + t * channels + channel, in_channel, 0.0)
        given = tl.load(b + t * entries + entry, in_entry, 0.0)
        asked = tl.load(c + t * entries + entry, in_entry, 0.0)
        state = tl.exp(time[:, None] * rates) * state + added[:, None] * given[None]
        tl.store(out + t * channels + channel, tl.sum(state * asked[None], 1), in_channel)
    tl.store(pages + tl.load(writes + i) * channels * entries + place, state, inside)
