"""Keys and values in 8 bits: integers or e4m3, times a scale.

A scale belongs to one head of one token and is stored in its page, or it is a constant of the layer, from the
checkpoint. Both are read in the same way: the scales of a layer are a tensor with one entry per token and head, whose
strides are 0 if there is one number only. A latent has two scales, because its two parts differ in size: one was
normalized, the other is a key with rotary embedding.

The arithmetic here is the definition; native and Triton kernels store the same bits. With A = max |x| of a head, its
scale is A / 127 (e4m3: A / 448), and an element is x * (127 / A), rounded to nearest even, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}  # the types of 8 bits, and the largest number of each
SCALE = torch.float32
_LEAST = 1e-30  # a head whose largest entry is below this is stored as zeros: 127 / A would overflow


@dataclass(frozen=True, slots=True)
class ScaledCache:
    """The keys or the values of a layer, `values * scales[..., None]`."""

    values: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], a type of LARGEST
    scales: torch.Tensor  # [num_blocks, block_size, num_kv_heads] float32
    constant: bool = False  # all scales are one number

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> None:
        """Store x `[T, num_kv_heads, head_dim]`."""
        if self.constant:
            inverse = 1.0 / self.scales[0, 0, 0]
        else:
            self.scales[blocks, offsets], inverse = scale_of(x, self.values.dtype)
            inverse = inverse[..., None]
        as_bytes(self.values)[blocks, offsets] = as_bytes(to_8_bits(x.float() * inverse, self.values.dtype))


@dataclass(frozen=True, slots=True)
class ScaledLatents:
    """The latents [c | k_pe] of a layer (`layers/mla.py`), each part times a scale of its own. c also serves as the
    values.
    """

    values: torch.Tensor  # [num_blocks, block_size, 1, width], a type of LARGEST
    scales: torch.Tensor  # [num_blocks, block_size, 1, 2] float32: of c, and of k_pe
    rank: int  # width of c
    constant: bool = False  # all scales are one number

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def latent(self) -> ScaledCache:
        """Return c alone."""
        return ScaledCache(self.values[..., : self.rank], self.scales[..., 0], self.constant)

    @property
    def rope(self) -> ScaledCache:
        """Return k_pe alone."""
        return ScaledCache(self.values[..., self.rank :], self.scales[..., 1], self.constant)

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> None:
        """Store x `[T, 1, width]`."""
        self.latent.write(blocks, offsets, x[..., : self.rank])
        self.rope.write(blocks, offsets, x[..., self.rank :])

    def widened(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return float32 of values `[..., width]` and scales `[..., 2]` that were taken from this cache."""
        parts = values.split([self.rank, values.shape[-1] - self.rank], -1)
        return torch.cat([widened(part, scale) for part, scale in zip(parts, scales.unbind(-1))], -1)


KVCache = torch.Tensor | ScaledCache | ScaledLatents


def store(cache: KVCache, slot_mapping: torch.Tensor, x: torch.Tensor) -> None:
    """Store x `[T, num_kv_heads, head_dim]` in the slots `[T]` of a cache."""
    blocks, offsets = slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]
    if isinstance(cache, torch.Tensor):
        cache[blocks, offsets] = x
    else:
        cache.write(blocks, offsets, x)


def load(cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
    """Return the contents of the slots `[T]`: float32 `[T, num_kv_heads, head_dim]`."""
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    if isinstance(cache, torch.Tensor):
        return cache[blocks, offsets].float()
    return widened(cache.values[blocks, offsets], cache.scales[blocks, offsets])


def values_of(cache: KVCache) -> torch.Tensor:
    """Return the elements of a cache, without their scales."""
    return cache if isinstance(cache, torch.Tensor) else cache.values


def tensors_of(cache: KVCache) -> list[torch.Tensor]:
    """Return the memory of a cache."""
    if isinstance(cache, torch.Tensor):
        return [cache]
    return [cache.values] if cache.constant else [cache.values, cache.scales]


def scale_of(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the scale of each head of x `[..., head_dim]`, the factor that turns the head into numbers of `dtype`).
    """
    largest = x.abs().amax(-1).float()
    most = torch.full_like(largest, LARGEST[dtype])  # dividing by a Python number may multiply by its inverse
    inverse = torch.where(largest < _LEAST, 0.0, most / largest)
    return largest / most, inverse


def to_8_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x as `dtype`; x is within its range, except for rounding errors or with a constant scale."""
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x.round() if dtype == torch.int8 else x).to(dtype)


def widened(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 of values `[..., head_dim]` with scales `[...]`."""
    return values.float() * scales[..., None]


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a type that every operation supports."""
    return values.view(torch.int8)
