"""The block types of GGUF files: dequantization in plain torch.

A row of a weight is a sequence of blocks of 32 or 256 values: a scale (and for some types a minimum), in the K types
also small scales of 16 or 32 values each, and the values' bits. `dequantize` gives the same float32 numbers as the
`gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.checkpoints.gguf.header import BLOCKS
from quire.worker.layers.quantization.packing import e2m1_doubled, e8m0

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Dequantize rows of blocks, uint8 `[n, bytes]`: float32 `[n, values]`."""
    _, size = BLOCKS[kind]
    values = _DEQUANTIZE[kind](blocks.reshape(-1, size))
    return values.view(len(blocks), -1)


def nibbles(blocks: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows of blocks of a type of `NIBBLE_TYPES` as codes of 4 bits in groups of 32: int32 `[n, values]`, and
    each group's scale and offset, float32 `[n, values / 32]`. A value is code * scale + offset.
    """
    _, size = BLOCKS[kind]
    codes, scales, offsets = NIBBLE_TYPES[kind](blocks.reshape(-1, size))
    return codes.view(len(blocks), -1), scales.view(len(blocks), -1), offsets.view(len(blocks), -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at byte `at` of each block: float32 `[b, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(stored: torch.Tensor) -> torch.Tensor:
    """Return the low halves of all bytes `[b, n]`, then the high ones: int32 `[b, 2 n]`."""
    return torch.cat([stored & 15, stored >> 4], 1).int()


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """Return the 32 bits of four bytes `[b, 4]`: int32 `[b, 32]`."""
    return (stored[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=stored.device) & 1).flatten(1).int()


def _nibbles_q4_0(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _halves(b[:, 2:]), _half(b, 0), -8 * _half(b, 0)


def _nibbles_q4_1(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _halves(b[:, 4:]), _half(b, 0), _half(b, 2)


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * (_halves(b[:, 2:]) - 8)


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * _halves(b[:, 4:]) + _half(b, 2)


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * ((_halves(b[:, 6:]) | _fifth_bits(b[:, 2:6]) << 4) - 16)


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * (_halves(b[:, 8:]) | _fifth_bits(b[:, 4:8]) << 4) + _half(b, 2)


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * b[:, 2:].contiguous().view(torch.int8)


def _two_bits(stored: torch.Tensor) -> torch.Tensor:
    """Return values of two bits of 64 bytes `[b, 64]`, of each half of 32 bytes first all low bits: int32 `[b,
    256]`.
    """
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=stored.device)[:, None]
    return (stored.reshape(-1, 2, 1, 32) >> shifts & 3).flatten(1).int()


def _scaled(values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """Return values `[b, 256]` times the scales `[b, g]` of their groups, less the groups' minima."""
    groups = scales.unsqueeze(-1) * values.unflatten(1, (scales.shape[1], -1))
    return (groups if minima is None else groups - minima.unsqueeze(-1)).flatten(1)


def _q2_k(b: torch.Tensor) -> torch.Tensor:
    scales = b[:, :16]
    return _scaled(_two_bits(b[:, 16:80]), _half(b, 80) * (scales & 15), _half(b, 82) * (scales >> 4))


def _q3_k(b: torch.Tensor) -> torch.Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    high = (b[:, None, :32] >> bits & 1).flatten(1).int()
    packed = b[:, 96:108]
    low = _halves(packed[:, :8])
    top = torch.cat([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], 1).int()
    return _scaled((_two_bits(b[:, 32:96]) | high << 2) - 4, _half(b, 108) * ((low | top << 4) - 32))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight scales and eight minima of six bits in twelve bytes `[b, 12]`."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], 1)
    minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], 1)
    return scales, minima


def _nibble_pairs(stored: torch.Tensor) -> torch.Tensor:
    """Return the low halves of each 32 bytes `[b, 128]`, then the high ones: int32 `[b, 256]`."""
    quarters = stored.reshape(-1, 4, 1, 32)
    return torch.cat([quarters & 15, quarters >> 4], 2).flatten(1).int()


def _nibbles_q4_k(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales, minima = _six_bits(b[:, 4:16])
    return _nibble_pairs(b[:, 16:]), _half(b, 0) * scales, -_half(b, 2) * minima


def _q4_k(b: torch.Tensor) -> torch.Tensor:
    codes, scales, offsets = _nibbles_q4_k(b)
    return _scaled(codes, scales, -offsets)


def _q5_k(b: torch.Tensor) -> torch.Tensor:
    scales, minima = _six_bits(b[:, 4:16])
    bits = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    high = (b[:, None, 16:48] >> bits & 1).flatten(1).int()
    return _scaled(_nibble_pairs(b[:, 48:]) | high << 4, _half(b, 0) * scales, _half(b, 2) * minima)


def _q6_k(b: torch.Tensor) -> torch.Tensor:
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], 2).flatten(1).int()
    high = _two_bits(b[:, 128:192])
    return _scaled((low | high << 4) - 32, _half(b, 208) * b[:, 192:208].contiguous().view(torch.int8))


def _iq4(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.int32, device=codes.device)[codes]


def _iq4_nl(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * _iq4(_halves(b[:, 2:]))


def _iq4_xs(b: torch.Tensor) -> torch.Tensor:
    low = torch.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], -1).flatten(1).int()
    bits = b[:, 2].int() | b[:, 3].int() << 8
    high = bits[:, None] >> torch.arange(0, 16, 2, device=b.device) & 3
    codes = b[:, 8:].reshape(-1, 8, 1, 16)
    codes = torch.cat([codes & 15, codes >> 4], 2).flatten(1).int()
    return _scaled(_iq4(codes), _half(b, 0) * ((low | high.int() << 4) - 32))


def _mxfp4(b: torch.Tensor) -> torch.Tensor:
    return e8m0(b[:, :1]) / 2 * e2m1_doubled(_halves(b[:, 1:]))


_DEQUANTIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
BLOCK_TYPES = tuple(_DEQUANTIZE)
NIBBLE_TYPES = {"Q4_0": _nibbles_q4_0, "Q4_1": _nibbles_q4_1, "Q4_K": _nibbles_q4_k}
