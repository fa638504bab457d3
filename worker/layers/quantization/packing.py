"""Unpacking of integers and 4-bit floats that are stored several to a byte or word."""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of 4-bit floats; the fourth bit is the sign
E2M1_TABLE = (*E2M1, *(-value for value in E2M1))


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` unsigned integers of `bits` bits in each row of int32 `words` `[n, w]`, low bits first
    and without gaps: uint8 `[n, count]`.

    E.g. with 3 bits the eleventh integer has its low two bits in the first word and its high bit in the second.
    """
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stored[:, :count].clone()
    if 8 % bits == 0:
        fields = [stored >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(fields, -1).flatten(1)[:, :count]
    places = torch.arange(count, device=words.device) * bits
    padded = torch.nn.functional.pad(stored, (0, 1)).int()
    first = places // 8
    pairs = padded[:, first] | padded[:, first + 1] << 8
    return (pairs >> (places % 8).int() & ((1 << bits) - 1)).to(torch.uint8)


def nibbles(stored: torch.Tensor, low_first: bool = True) -> torch.Tensor:
    """Return the two halves of each byte of uint8 `[..., n]`: uint8 `[..., 2 n]`."""
    low, high = stored & 15, stored >> 4
    return torch.stack([low, high] if low_first else [high, low], -1).flatten(-2)


def e2m1_doubled(codes: torch.Tensor) -> torch.Tensor:
    """Return twice the value of 4-bit floats (sign, two bits of exponent, one of mantissa), which is a whole number:
    int8.
    """
    table = [round(2 * value) for value in E2M1_TABLE]
    return torch.tensor(table, dtype=torch.int8, device=codes.device)[codes.long()]


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (exponent - 127) of uint8 exponents, in float32."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)
