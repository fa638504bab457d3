"""The formats that `quire quantize` writes: presets of compressed-tensors, under the settings that llm-compressor calls
W4A16, W8A16, W8A8 and FP8_DYNAMIC. vLLM reads them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

GROUP_SIZES = (128, 64, 32)  # tried in this order: the first that divides the columns of all weights
_SHRINK = (1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825, 0.8)  # factors of the largest scale of 4-bit integers
_TINY = 1e-10


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight `[n, k]`: values int8 or e4m3 `[n, k]`, scales `[n, groups]`."""

    values: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """Return the weight in float32."""
        size = self.values.shape[1] // self.scales.shape[1]
        return self.values.float() * self.scales.float().repeat_interleave(size, 1)


@dataclass(frozen=True, slots=True)
class Format:
    """Integers of `bits` bits in groups of `group` columns (None: one scale per row), or e4m3 floats.

    Weights whose inputs servers may round to 8 bits are stored unpacked, with scales in float32; the others' scales
    have `scale_dtype`.
    """

    name: str
    bits: int
    group: int | None
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def is_float(self) -> bool:
        return self.name == "fp8"

    @property
    def rounds_inputs(self) -> bool:
        """Return whether servers should also round the weights' inputs to 8 bits, per token."""
        return self.name in ("fp8", "w8a8")

    @property
    def storage(self) -> str:
        """Return the name of the tensors' layout."""
        if self.is_float:
            return "float-quantized"
        return "int-quantized" if self.rounds_inputs else "pack-quantized"

    def group_length(self, columns: int) -> int:
        return self.group or columns

    def scales(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
        """Return scales `[n, groups]` of weight `[n, k]` float32, as the checkpoint has them: positive.

        Scales of 4-bit integers are those of a few candidates with the least squared error; `importance` `[k]` weighs
        the columns' errors.
        """
        groups = weight.unflatten(1, (-1, self.group_length(weight.shape[1])))
        largest = groups.abs().amax(-1)
        if self.is_float:
            return (largest / 448).clamp(min=_TINY)
        full = self._in_file(largest / (2 ** (self.bits - 1) - 0.5))
        if self.bits == 8:
            return full
        cost = None if importance is None else importance.unflatten(0, (-1, groups.shape[-1]))
        best = torch.full(full.shape, torch.inf, device=weight.device)
        chosen = full.clone()
        for factor in _SHRINK:
            scales = self._in_file(full.float() * factor)
            wide = scales.float().unsqueeze(-1)
            error = (self.round(groups, wide) * wide - groups).square_()
            error = (error if cost is None else error * cost).sum(-1)
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, scales, chosen)
        return chosen

    def _in_file(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.clamp(min=max(_TINY, torch.finfo(self.scale_dtype).tiny)).to(self.scale_dtype)

    def round(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the nearest values in float32, in units of the scales, which broadcast."""
        units = weight / scales
        if self.is_float:
            return units.clamp_(-448, 448).to(torch.float8_e4m3fn).float()
        limit = 2 ** (self.bits - 1)
        return units.round_().clamp_(-limit, limit - 1)

    def stored(self, values: torch.Tensor, scales: torch.Tensor) -> Quantized:
        """Return the stored form of values in float32 that `round` returned."""
        return Quantized(values.to(torch.float8_e4m3fn if self.is_float else torch.int8), scales)

    def nearest(self, weight: torch.Tensor) -> Quantized:
        """Return weight `[n, k]` rounded to nearest."""
        weight = weight.float()
        scales = self.scales(weight)
        wide = scales.float().repeat_interleave(self.group_length(weight.shape[1]), 1)
        return self.stored(self.round(weight, wide), scales)

    def tensors(self, name: str, weight: Quantized) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint."""
        if self.rounds_inputs:
            return {f"{name}.weight": weight.values, f"{name}.weight_scale": weight.scales}
        return {
            f"{name}.weight_packed": pack(weight.values, self.bits),
            f"{name}.weight_scale": weight.scales,
            f"{name}.weight_shape": torch.tensor(weight.values.shape),
        }

    def config(self, ignored: Sequence[str], act_order: bool = False) -> dict[str, Any]:
        """Return the `quantization_config`; `ignored` are the names of linear layers that are not quantized."""
        shared = {"symmetric": True, "block_structure": None, "observer_kwargs": {}}
        weights = shared | {
            "num_bits": self.bits,
            "type": "float" if self.is_float else "int",
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "dynamic": False,
            "actorder": "weight" if act_order else None,
            "observer": "minmax",
        }
        inputs = shared | {
            "num_bits": 8,
            "type": "float" if self.is_float else "int",
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
            "actorder": None,
            "observer": None,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs if self.rounds_inputs else None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.storage,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def choose_format(
    name: str, columns: dict[str, int], group: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Format:
    """Return the format called int4, int8, w8a8 or fp8 for weights with `columns` columns each, by name. `group` None:
    the largest of GROUP_SIZES that fits, or whole rows; -1: whole rows. `dtype` is that of the model.

    Raises:
        ValueError: `group` does not divide the columns of a weight, which it names.
    """
    if name in ("fp8", "w8a8"):
        if group is not None:
            raise ValueError(f"--group-size is for int4 and int8: {name} has one scale per row")
        return Format(name, 8, None, torch.float32)
    bits, dtype = {"int4": 4, "int8": 8}[name], torch.bfloat16 if dtype == torch.float32 else dtype
    if group is None:
        group = next((n for n in GROUP_SIZES if not any(k % n for k in columns.values())), -1)
    for weight, k in columns.items():
        if group != -1 and (group < 1 or k % group):
            raise ValueError(f"--group-size {group} does not divide the {k} columns of {weight}")
    return Format(name, bits, None if group == -1 else group, dtype)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int8 `[n, k]` in words int32 `[n, ceil(k * bits / 32)]`, low bits first, each with 2 ** (bits - 1) added.
    """
    each = 32 // bits
    unsigned = values.int() + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % each)).unflatten(1, (-1, each))
    words = torch.zeros(unsigned.shape[:2], dtype=torch.int32, device=values.device)
    for i in range(each):
        words |= unsigned[..., i] << (bits * i)
    return words
