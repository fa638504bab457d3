"""Keys and values in 8 bits in Triton: the arithmetic of `attention/scaled.py`, bit for bit, as functions for kernels,
and the kernel that stores them.

e4m3 is handled as bytes, because GPUs before Hopper do not convert it. As float16, whose exponents are larger by 8, the
bits of an e4m3 number are the number divided by 2^8.
"""

from __future__ import annotations

import torch

from quire.worker.attention.scaled import KVCache, ScaledCache, as_bytes, store

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU installation without triton
    triton = None

INT8, E4M3 = 1, 2  # kinds of caches in kernels; 0: not in 8 bits
_KINDS = {torch.int8: INT8, torch.float8_e4m3fn: E4M3}


def kind_of(cache: KVCache) -> int:
    """Return the kind of a cache in kernels."""
    return 0 if isinstance(cache, torch.Tensor) else _KINDS[cache.values.dtype]


if triton is not None:

    @triton.jit
    def numbers_of(stored, KIND: tl.constexpr, dtype: tl.constexpr):
        """Return bytes of a cache as numbers of `dtype`, exactly; e4m3 divided by 256."""
        if KIND == 2:
            words = (stored.to(tl.int16) << 7) & -16512  # sign and magnitude in the places of float16's
            return words.to(tl.float16, bitcast=True).to(dtype)
        return stored.to(dtype)

    @triton.jit
    def factors(largest, KIND: tl.constexpr):
        """Return (the scale of a head with this largest magnitude, the factor that turns the head into numbers of 8
        bits).
        """
        most = 127.0 if KIND == 1 else 448.0
        inverse = tl.where(largest < 1e-30, 0.0, tl.div_rn(most, tl.maximum(largest, 1e-30)))
        return tl.div_rn(largest, most), inverse

    @triton.jit
    def bytes_of(x, inverse, KIND: tl.constexpr):
        """Return x (float32) times `inverse`, rounded to 8 bits."""
        most = 127.0 if KIND == 1 else 448.0
        x = tl.minimum(tl.maximum(x * inverse, -most), most)
        if KIND == 1:
            # 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits
            return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        below = (tl.abs(x) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF  # in steps of 2^-9
        above = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        code = tl.where(magnitude > 0x7F800000, 0x7F, tl.where(magnitude < 0x3C800000, below, above))
        return (((bits >> 24) & 0x80) | code).to(tl.int8)

    @triton.jit
    def _store_kernel(
        x, values, scales, slot_mapping, token_stride, head_stride, page_stride, slot_stride, value_head_stride,
        scale_page_stride, scale_slot_stride, scale_head_stride, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
        PAGE_SIZE: tl.constexpr, KIND: tl.constexpr, CONSTANT: tl.constexpr,
    ):  # fmt: skip
        token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        lanes = tl.arange(0, BLOCK)
        mask = lanes < HEAD_DIM
        entries = tl.load(x + token * token_stride + head * head_stride + lanes, mask=mask, other=0.0).to(tl.float32)
        slot = tl.load(slot_mapping + token)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        at = scales + page * scale_page_stride + offset * scale_slot_stride + head * scale_head_stride
        if CONSTANT:
            inverse = tl.div_rn(1.0, tl.load(at))
        else:
            # the sum is 0, or NaN if an entry is not finite, which a maximum may drop
            scale, inverse = factors(tl.max(tl.abs(entries), 0) + tl.sum(entries * 0.0, 0), KIND)
            tl.store(at, scale)
        to = values + page * page_stride + offset * slot_stride + head * value_head_stride + lanes
        tl.store(to, bytes_of(entries, inverse, KIND), mask=mask)


def store_scaled(cache: KVCache, slot_mapping: torch.Tensor, x: torch.Tensor) -> None:
    """Do `scaled.store` with one launch; x `[T, num_kv_heads, head_dim]` has contiguous entries."""
    if not isinstance(cache, ScaledCache):
        return store(cache, slot_mapping, x)
    _, block_size, heads, dim = cache.shape
    _store_kernel[(len(x), heads)](
        x, as_bytes(cache.values), cache.scales, slot_mapping, *x.stride()[:2], *cache.values.stride()[:3],
        *cache.scales.stride(), HEAD_DIM=dim, BLOCK=triton.next_power_of_2(dim), PAGE_SIZE=block_size,
        KIND=kind_of(cache), CONSTANT=cache.constant, num_warps=1,
    )  # fmt: skip
