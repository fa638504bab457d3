"""Launches every Triton kernel with the shapes of real models, for `tools/compile_kernels.py`. The first launch of a
kernel is the one that needs the most registers among those of every model.
"""

from __future__ import annotations

import torch

from quire.worker.attention.scaled import ScaledCache, ScaledLatents
from quire.worker.batch.input_batch import InputBuffers
from quire.worker.cuda.kernels import (
    limits,
    triton_dequantize,
    triton_experts,
    triton_experts_fp8,
    triton_fixed,
    triton_fp8,
    triton_logits,
    triton_lora,
    triton_mla,
    triton_ops,
    triton_paged,
    triton_quantized,
    triton_routing,
    triton_sampler,
    triton_scaled,
    triton_state_rows,
    triton_states,
    triton_step,
    triton_tiles,
)
from quire.worker.layers.lora import LinearLora, LoraRows, LoraWeights, StepLora
from quire.worker.layers.lora_slots import LoraSlots
from quire.worker.layers.quantization.gguf_blocks import BLOCK_TYPES
from quire.worker.layers.quantization.packing import E2M1_TABLE
from quire.worker.layers.rounding import Rounding
from quire.worker.layers.state import Span, StateStep
from quire.worker.layers.states.delta_rule import DeltaHeads
from quire.worker.spec.moe import RoutingSpec


def attention() -> None:
    """Launch bf16 attention in usual shapes (Llama 3.1, Qwen3, decode and prefill, splits), other features once."""
    cases = [  # query lens, heads, kv heads, dim, page, window, soft cap, splits
        ([3, 70], 32, 8, 128, 16, None, None, None),
        ([1] * 9, 32, 8, 128, 16, None, None, 1),
        ([1] * 2, 32, 8, 128, 16, None, None, 8),
        ([3, 70], 14, 2, 64, 256, 100, 30.0, None),
        ([5, 2], 8, 4, 256, 16, None, None, None),
    ]
    for query_lens, heads, kv_heads, dim, page, window, soft_cap, splits in cases:
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        q, cache = (
            torch.zeros(sum(query_lens), heads, dim, dtype=torch.bfloat16),
            torch.zeros(3, page, kv_heads, dim, dtype=torch.bfloat16),
        )
        table, lens = torch.zeros(len(query_lens), 40, dtype=torch.int32), torch.tensor(query_lens).int()
        triton_paged.paged_attention(
            q, cache, cache, table, starts, lens, max(query_lens), 0.1, window, soft_cap, splits
        )
    for query_lens, splits in (([1] * 2, 8), ([3, 70], None)):  # gpt-oss
        starts, lens = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(query_lens).int()
        q, cache = (torch.zeros(n, h, 64, dtype=torch.bfloat16) for n, h in ((sum(query_lens), 64), (48, 8)))
        table, sinks = torch.zeros(len(query_lens), 40, dtype=torch.int32), q[0, :, 0].contiguous()
        cache, longest = cache.view(3, 16, 8, 64), max(query_lens)
        triton_paged.paged_attention(q, cache, cache, table, starts, lens, longest, 0.1, 128, None, splits, sinks)


def eight_bits() -> None:
    """Launch the storing of keys and values in int8 and e4m3, with and without norms and rotation, and attention."""
    slots = torch.arange(70)
    for kind, constant in ((torch.int8, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True)):
        scales = torch.ones(() if constant else (9, 16, 8)).expand(9, 16, 8)
        cache = ScaledCache(torch.zeros(9, 16, 8, 128, dtype=kind), scales, constant)
        triton_scaled.store_scaled(cache, slots, torch.zeros(70, 8, 128, dtype=torch.bfloat16))
        qkv, weight = torch.zeros(70, 48 * 128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)
        triton_ops.qk_norm_rope_write(qkv, weight, weight, 1e-6, torch.zeros(80, 128), slots, cache, cache, slots, 32)
        for query_lens, splits in (([1] * 9, 1), ([1] * 2, 8), ([3, 67], None)):
            starts, lens = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(query_lens).int()
            q = torch.zeros(sum(query_lens), 32, 128, dtype=torch.bfloat16)
            table = torch.zeros(len(query_lens), 40, dtype=torch.int32)
            triton_paged.paged_attention(q, cache, cache, table, starts, lens, max(query_lens), 0.1, None, None, splits)


def latent_attention() -> None:
    """Launch MLA in the sizes of DeepSeek V3 and MiniCPM3: decode with and without splits, a chunk, 8 bits, and
    expanded keys and values.
    """
    for query_lens, heads, rank, rope, splits in (
        ([1] * 9, 128, 512, 64, 1),
        ([1], 16, 512, 64, 8),
        ([3, 7], 40, 256, 32, 1),
    ):
        starts, lens = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(query_lens).int()
        q, cache = (torch.zeros(sum(query_lens), n, rank + rope, dtype=torch.bfloat16) for n in (heads, 1))
        table = torch.zeros(len(query_lens), 40, dtype=torch.int32)
        cache, scales = cache[:1, None].expand(3, 16, 1, -1), torch.zeros(3, 16, 1, 2)
        in_8_bits = (ScaledLatents(cache.to(kind), scales, rank) for kind in (torch.int8, torch.float8_e4m3fn))
        for latents in (cache, *in_8_bits):
            triton_mla.latent_attention(q, latents, rank, table, starts, lens, max(query_lens), 0.1, splits)
        angles, places = torch.zeros(64, rope), torch.zeros(len(q), dtype=torch.int64)
        triton_mla.rotate_tails(torch.zeros(len(q), heads, 128 + rope, dtype=torch.bfloat16), angles, places)
        stored = torch.zeros(len(q), 1536 + rank + rope, dtype=torch.bfloat16)[:, 1536:]
        pages = torch.zeros(3, 16, 1, rank + rope, dtype=torch.bfloat16)
        triton_mla.write_latents(stored, torch.zeros(rank), 1e-6, angles, places, pages, places)
    q, k, v = (torch.zeros(70, 16, dim, dtype=torch.bfloat16) for dim in (192, 192, 128))
    starts, table = torch.tensor([0, 70]).int(), torch.zeros(1, 40, dtype=torch.int32)
    triton_paged.paged_attention(q, k[None, :16], v[None, :16], table, starts, starts[1:], 70, 0.1)


def operations() -> None:
    x = torch.zeros(3, 4096, dtype=torch.bfloat16)
    triton_ops.rms_norm(x, x[0], 1e-6)
    triton_ops.add_rms_norm(x, x.clone(), x[0], 1e-6)
    triton_ops.silu_and_mul(torch.zeros(3, 2 * 14336, dtype=torch.bfloat16))
    cache, positions = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16), torch.arange(3)
    for weight in (None, x[0, :128]):
        triton_ops.qk_norm_rope_write(
            torch.zeros(3, 48 * 128, dtype=torch.bfloat16),
            weight,
            weight,
            1e-6,
            torch.zeros(64, 128),
            positions,
            cache,
            cache,
            positions,
            32,
        )


def step() -> None:
    """Return a step that decodes 256 requests with a context of 4096 and prefills a prompt."""
    buffers = InputBuffers(256, 8192, 256, torch.device("cpu"))
    for lengths in ([1] * 250, [1] * 250 + [4096]):
        tensors = buffers.views_for_step(256, sum(lengths) + 256 - len(lengths), 256)
        num, tokens, table = len(lengths), torch.zeros(256, 4096, dtype=torch.int32), buffers.block_tables
        packed, sizes = torch.zeros(5 * num + 1, dtype=torch.int64), [num, num, num, num + 1, num]
        triton_step.fill_inputs(packed, sizes, tokens, table, 16, tensors, buffers.arange, max(lengths))
        triton_step.write_entries(table.view(-1), packed, packed)
        triton_step.append_tokens(tokens, packed, packed, packed, 4096)


def sampler() -> None:
    rows = torch.arange(3)
    tables = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    triton_logits.exclude_by_bitmask(torch.zeros(3, 151936), rows, torch.zeros(3, 4748, dtype=torch.int32))
    filters = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.float64), torch.zeros(8)
    for dtype in (torch.float32, torch.bfloat16):
        logits, tokens = torch.zeros(3, 151936, dtype=dtype), torch.zeros(8, 4096, dtype=torch.int32)
        triton_sampler.sample(logits, rows, rows, *tables, tokens=tokens)
        triton_sampler.sample(logits, rows, rows, *tables, *filters, tokens=tokens)
    logits, best = torch.zeros(3, 151936), (torch.zeros(3, 20), torch.zeros(3, 20, dtype=torch.int64))
    triton_logits.penalize(logits, tokens, torch.stack([rows] * 5), logits[:, :3])
    for some in (best, None):
        triton_logits.logprobs(logits, rows, some, normalize=True)


def routing() -> None:
    """Launch the routing of Qwen3-30B-A3B, gpt-oss and DeepSeek V3, with the tiles of decode and of prompts."""
    for spec in (
        RoutingSpec(128, 8, weights="normalized"),
        RoutingSpec(32, 4, "logits", "softmax", bias=True),
        RoutingSpec(256, 8, "sigmoid", "normalized", 2.5, 1e-20, 8, 4, 2, correction=True),
    ):
        num = spec.num_experts
        biases = [torch.zeros(num) if there else None for there in (spec.correction, spec.bias)]
        triton_routing.route(spec, torch.zeros(8, num, dtype=torch.bfloat16), *biases)
        for tokens, tile in ((8, 16), (8192, 128)):
            triton_routing.sort_by_expert(torch.zeros(tokens, spec.top_k, dtype=torch.int64), 0, num, tile)


def experts() -> None:
    """Launch the experts of Qwen3-30B-A3B in decode and prefill, and of gpt-oss."""
    for tokens, num, hidden, size, top_k, activation in (
        (4096, 128, 2048, 768, 8, "silu"),
        (1024, 128, 2048, 768, 8, "silu"),
        (8, 128, 2048, 768, 8, "silu"),
        (8, 32, 2880, 2880, 4, "clamped_silu"),
    ):
        shapes = (num, 2 * size, hidden), (num, hidden, size), (num, 2 * size), (num, hidden)
        parameters = [torch.empty(1, dtype=torch.bfloat16).expand(shape) for shape in shapes]
        ids = torch.arange(tokens * top_k).view(tokens, top_k) % num
        biases = parameters[2:] if activation == "clamped_silu" else (None, None)
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        triton_experts.fused_experts(x, torch.ones(tokens, top_k), ids, *parameters[:2], *biases, activation)
        kinds = ("mxfp4",) if biases[0] is not None else ("int4", "nvfp4", "Q4_K") if tokens == 8 else ("mxfp4",)
        for kind in kinds:
            stacks = [stack_of(kind, shape) for shape in shapes[:2]]
            triton_experts.fused_experts(x, torch.ones(tokens, top_k), ids, *stacks, *biases, activation)


def stack_of(kind: str, shape: tuple[int, int, int]) -> triton_experts.Stack:
    """Return a stack of weights without memory of its own."""

    def empty(dtype: torch.dtype, columns: int) -> torch.Tensor:
        return torch.empty(1, dtype=dtype).expand(*shape[:2], columns)

    if kind in BLOCK_TYPES:
        values, size = triton_quantized.BLOCKS[kind]
        return triton_experts.StackedBlocks(empty(torch.uint8, shape[2] // values * size), kind)
    codes = empty(torch.uint8, shape[2] // 2)
    if kind == "int4":
        return triton_quantized.StoredGroups(codes, empty(torch.float16, shape[2] // 32), None, 4, 32)
    if kind == "mxfp4":
        exponents = empty(torch.float8_e8m0fnu, shape[2] // 32)
        return triton_quantized.StoredGroups(codes, exponents, None, 4, 32, E2M1_TABLE)
    scales, row_scales = empty(torch.float8_e4m3fn, shape[2] // 16), torch.zeros(1).expand(shape[:2])
    return triton_quantized.StoredGroups(codes, scales, None, 4, 16, E2M1_TABLE, row_scales)


def quantized() -> None:
    """Launch decode and prefill with the weights of Qwen3-8B's MLP, and products with so few outputs that their sums
    are split.
    """
    x, scales = torch.zeros(8, 4096, dtype=torch.bfloat16), torch.zeros(1024, 32, dtype=torch.float16)
    codes = torch.zeros(1024, 2048, dtype=torch.uint8)
    triton_tiles.multiply_tiles(x, triton_tiles.StoredTiles(codes.view(64, -1, 16, 64), scales, None, 128, "int4"))
    floats = torch.zeros(1024, 4096, dtype=torch.float8_e4m3fn)
    triton_quantized.multiply_groups(x, triton_quantized.StoredGroups(floats, scales[:, :1], None, 8, 4096))
    for rows in (48, 8, 32, 1024):
        x, scales = torch.zeros(rows, 4096, dtype=torch.bfloat16), torch.zeros(12288, 32, dtype=torch.float16)
        values, codes = torch.zeros(12288, 4096, dtype=torch.int8), torch.zeros(12288, 2048, dtype=torch.uint8)
        small = [torch.zeros(12288, 4096 // group, dtype=torch.uint8) for group in (32, 16)]
        powers, floats = small[0].view(torch.float8_e8m0fnu), small[1].view(torch.float8_e4m3fn)
        table = tuple(map(float, range(16)))
        for stored in (
            (values, scales, None, 8, 128),
            (values.view(torch.float8_e4m3fn), scales.float(), None, 8, 128),
            (codes, scales, scales, 4, 128),
            (codes, powers, None, 4, 32, E2M1_TABLE),
            (codes, floats, None, 4, 16, E2M1_TABLE, torch.zeros(12288)),
            (codes, torch.zeros(12288, 64), None, 4, 64, table),
        ):
            groups = triton_quantized.StoredGroups(*stored)
            triton_quantized.multiply_groups(x, groups)
            if (half := triton_tiles.half_of(groups)) is not None:
                form = "e2m1" if groups.table else "int4"
                tiles = triton_tiles.StoredTiles(
                    codes.view(768, -1, 16, half), groups.scales, groups.zeros, groups.group, form, groups.row_scales
                )
                triton_tiles.multiply_tiles(x, tiles)
                if rows == 1024:
                    triton_dequantize.dequantize_tiles(tiles, 0, torch.zeros(4096, 4096, dtype=torch.bfloat16))
            elif rows == 1024:
                triton_dequantize.dequantize_groups(groups, 0, torch.zeros(4096, 4096, dtype=torch.bfloat16))
        for kind in BLOCK_TYPES if rows == 8 else ("Q4_K", "Q6_K"):
            values, size = triton_quantized.BLOCKS[kind]
            blocks = torch.zeros(1, 1, dtype=torch.uint8).expand(12288, 4096 // values * size)
            triton_quantized.multiply_blocks(x, blocks, kind, torch.zeros(rows, 12288, dtype=torch.bfloat16))
            if rows == 1024:
                triton_dequantize.dequantize_blocks(blocks, kind, 0, torch.zeros(4096, 4096, dtype=torch.bfloat16))


def floats8() -> None:
    """Launch FP8 in blocks of 128 x 128: Qwen3-8B's MLP and the experts of Qwen3-30B-A3B, with their rounding."""
    for rounding in (Rounding(128), Rounding()):
        x = torch.zeros(20, 4096, dtype=torch.bfloat16)
        triton_fp8.round_rows(x, rounding)
        triton_ops.add_rms_norm(x, x.clone(), x[0], 1e-6, rounding)
        triton_ops.silu_and_mul(torch.zeros(20, 2 * 12288, dtype=torch.bfloat16), rounding)
    if limits.for_device(x.device).capability < 89:
        return
    for rows in (300, 48):
        x = triton_fp8.empty_rounded(torch.empty(rows, 4096), Rounding(128))
        values, scales = torch.empty(12288, 4096, dtype=torch.float8_e4m3fn), torch.zeros(12288, 32)
        triton_fp8.multiply_rounded(x, values, scales, None, torch.bfloat16)
    stacks = []
    for shape in ((128, 1536, 2048), (128, 2048, 768)):
        values = torch.empty(1, dtype=torch.float8_e4m3fn).expand(shape)
        scales = torch.zeros(1).expand(*shape[:2], shape[2] // 128)
        stacks.append(triton_quantized.StoredGroups(values, scales, None, 8, 128))
    x, ids = torch.zeros(1024, 2048, dtype=torch.bfloat16), torch.zeros(1024, 8, dtype=torch.int64)
    triton_experts_fp8.fused_experts(x, torch.ones(1024, 8), ids, *stacks, "silu")


def adapters() -> None:
    """Launch two adapters of rank 16 for q, k and v of Qwen3-8B."""
    x = torch.zeros(9, 4096, dtype=torch.bfloat16)
    spans = [slice(0, 4096), slice(4096, 5120), slice(5120, 6144)]
    parts = [
        (slice(16 * i, 16 * i + 16), span, torch.zeros(span.stop - span.start, 16, dtype=x.dtype))
        for i, span in enumerate(spans)
    ]
    weights = LoraWeights(torch.zeros(48, 4096, dtype=x.dtype), parts)
    groups = [(LoraRows(key, torch.arange(4), None, False), weights) for key in "ab"]
    out = torch.zeros(9, 6144, dtype=x.dtype)
    triton_lora.add(x, out, groups)
    lora = LinearLora(StepLora(), 3, 3)
    slots = LoraSlots([lora], 8, 9, 16, x.device)
    triton_lora.add_slots(x, out, slots, lora.slots)


def fixed() -> None:
    """Launch the products of `--deterministic`: Qwen3-8B's MLP, and the heads of DeepSeek V3."""
    x = torch.zeros(70, 4096, dtype=torch.bfloat16)
    triton_fixed.multiply(x, torch.zeros(12288, 4096, dtype=x.dtype))
    triton_fixed.multiply(x.float()[:, :2048], torch.zeros(128, 2048))
    w_k = torch.zeros(16, 128, 512, dtype=torch.bfloat16)
    triton_fixed.multiply_heads(torch.zeros(9, 16, 128, dtype=torch.bfloat16), w_k.transpose(1, 2))


def states() -> None:
    """Launch the mixers of LFM2 and Qwen3.5, Kimi-Linear, Nemotron 3 and Falcon-H1, and Falcon-Mamba."""
    step = state_step([1] * 3), state_step([3, 1, 70])
    for part in step:
        num = int(part.starts[-1])
        for channels, width, bias, silu in ((2048, 3, False, False), (8192, 4, True, True)):
            weight, pages = torch.zeros(width, channels), torch.zeros(4, width - 1, channels)
            x = torch.zeros(num, 2 * channels, dtype=torch.bfloat16)[:, :channels]
            triton_states.causal_conv(x, weight, torch.zeros(channels) if bias else None, pages, part, silu)
        for heads, repeats, dk, decays in ((32, 2, 128, 1), (32, 1, 128, 128)):
            q, v = torch.zeros(num, heads // repeats, dk), torch.zeros(num, heads, dk)
            g, beta, pages = torch.zeros(num, heads, decays), torch.zeros(num, heads), torch.zeros(4, heads, dk, dk)
            for fixed_order in (False, True):
                triton_states.gated_delta_rule(q, q, v, g, beta, pages, part, fixed_order=fixed_order)
        mixed, gates = torch.zeros(num, 8192), torch.zeros(num, 64)
        triton_state_rows.delta_inputs(mixed, gates, gates[0, :32], gates[0, :32], DeltaHeads(16, 128, 32, False, 1.0))
        z = torch.zeros(num, 12288, dtype=torch.bfloat16)[:, 8192:]
        triton_state_rows.gated_norm(torch.zeros(num, 32, 128), z, torch.zeros(128), 1e-6)
        for size in (16, 128, 4096):
            rows = torch.zeros(num, size)
            triton_state_rows.state_norm(rows, rows[0], 1e-6)
            triton_state_rows.l2_norm(rows)
            triton_state_rows.square_sums(rows)
        for heads, repeats, dk, dv in ((64, 8, 128, 64), (48, 48, 256, 64)):
            q, v = torch.zeros(num, heads // repeats, dk), torch.zeros(num, heads, dv)
            triton_states.linear_attention(q, q, v, torch.zeros(num, heads), torch.zeros(4, heads, dk, dv), part)
        x, b = torch.zeros(num, 8192), torch.zeros(num, 16)
        triton_states.selective_scan(x, x, torch.zeros(8192, 16), b, b, torch.zeros(4, 8192, 16), part)


def state_step(counts: list[int]) -> StateStep:
    """Return the step of requests that compute these numbers of tokens."""
    starts, pages = torch.tensor([0, *counts]).cumsum(0).int(), torch.arange(len(counts))
    spans = [Span(i, int(starts[i]), int(starts[i + 1]), False) for i, count in enumerate(counts) if count > 1]
    ones = pages[starts.diff() == 1], starts[:-1][starts.diff() == 1].long()
    return StateStep(pages, pages, pages > 0, starts, spans, ones if spans else None)


PARTS = (
    *(operations, step, sampler, attention, eight_bits, latent_attention),
    *(routing, experts, quantized, floats8, adapters, states, fixed),
)
