"""Checkpoints of llm-compressor: `quant_method` compressed-tensors.

`config_groups` give a scheme to the layers that their `targets` name. Activations stay in the model's type, whatever
`input_activations` says, which is more exact. Read: integers of 1 to 8 bits (packed or one per byte), e4m3, MXFP4 and
NVFP4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from quire.worker.layers.quantization.fp4 import Mxfp4, Nvfp4
from quire.worker.layers.quantization.fp8 import ACTIVATION_SCALES, Fp8
from quire.worker.layers.quantization.int_groups import Groups
from quire.worker.layers.quantization.packing import unpack_words
from quire.worker.layers.quantization.stored import (
    COLUMNS,
    ROWS,
    Axis,
    CheckpointFormat,
    IntegerGroups,
    Piece,
    Scheme,
    Stored,
    grouped,
    signed,
    unsupported,
)

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp8-quantized",
)


class Integers(IntegerGroups):
    """Integers of `bits` bits, packed to words of 32 bits or as int8, in groups of columns (None: one group per row;
    `per_tensor`: one in all).

    With `act_order` a tensor names the group of each column.
    """

    def __init__(
        self,
        bits: int,
        group: int | None,
        *,
        packed: bool,
        per_tensor: bool = False,
        symmetric: bool = True,
        act_order: bool = False,
    ):
        super().__init__(bits, group, not symmetric, act_order)
        self.packed, self.symmetric = packed, symmetric
        self.rows = 1 if per_tensor else Axis(ROWS)
        self.packed_zeros = packed and not per_tensor

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        words = Axis(COLUMNS, 32, self.bits)
        stored = {
            "values": Stored("weight_packed", (Axis(ROWS), words), torch.int32)
            if self.packed
            else Stored("weight", (Axis(ROWS), Axis(COLUMNS)), torch.int8),
            "scales": Stored("weight_scale", (self.rows, self.groups), torch.float32),
        }
        if not self.symmetric and self.packed_zeros:
            stored["zeros"] = Stored("weight_zero_point", (Axis(ROWS, 32, self.bits), self.groups), torch.int32)
        elif not self.symmetric:
            stored["zeros"] = Stored("weight_zero_point", (self.rows, self.groups), torch.float32, ("I8", "I32", "F32"))
        if self.act_order:
            stored["group_of"] = Stored("weight_g_idx", (Axis(COLUMNS),), torch.int64)
        return stored

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups | torch.Tensor:
        if self.packed:
            axis = Axis(COLUMNS, 32, self.bits)
            values = unpack_words(tensors["values"], self.bits, tensors["values"].shape[1] * 32 // self.bits)
            values = signed(axis.trim(piece, values, 1), self.bits)
        else:
            values = tensors["values"].clone()
        scales, zeros = tensors["scales"].expand(len(values), -1), tensors.get("zeros")
        if zeros is not None:
            zeros = self._zeros(piece, zeros).float().expand_as(scales)
        return grouped(piece, values, scales, zeros, self.stored_bits, self.group, tensors.get("group_of"))

    def _zeros(self, piece: Piece, zeros: torch.Tensor) -> torch.Tensor:
        if not self.packed_zeros:
            return zeros
        unpacked = unpack_words(zeros.T, self.bits, len(zeros) * 32 // self.bits).T
        return signed(Axis(ROWS, 32, self.bits).trim(piece, unpacked, 0), self.bits)


class CompressedTensorsFormat(CheckpointFormat):
    """The format of compressed-tensors. Raises ValueError for a setting that is not supported."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            unsupported("sparsity_config.format", sparsity, "dense")
        if config.get("transform_config"):
            unsupported("transform_config", config["transform_config"], "none")
        self.ignored = config.get("ignore") or []
        groups = config.get("config_groups")
        if not isinstance(groups, dict):
            unsupported("config_groups", groups, "an object of schemes")
        default = config.get("format", "")
        self.groups = [
            (group.get("targets") or [], _scheme(group.get("weights"), group.get("format") or default))
            for group in groups.values()
        ]

    def find(self, name: str) -> Scheme | None:
        modules = self.modules(name)
        if any(_matches(module, pattern) for module in modules for pattern in self.ignored):
            return None
        # a target that names the layer wins over one that names its class
        for by_class in (False, True):
            for targets, scheme in self.groups:
                if any(
                    target == "Linear" if by_class else any(_matches(module, target) for module in modules)
                    for target in targets
                ):
                    return scheme
        return None

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        return name.endswith(".weight_shape") or bool(ACTIVATION_SCALES.search(name))


def _matches(name: str, pattern: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else name == pattern


def _scheme(weights: dict[str, Any] | None, form: str) -> Scheme | None:
    """Return the scheme of a group's `weights`, None if only its activations are quantized."""
    if weights is None:
        return None
    if form not in _FORMATS:
        unsupported("format", form, ", ".join(_FORMATS))
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    group = weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if form == "mxfp4-pack-quantized":
        return Mxfp4()
    if form == "mxfp8-quantized":
        return Fp8(1, 32, exponents=True)
    if form == "nvfp4-pack-quantized":
        return Nvfp4("weight_packed", "weight_scale", "weight_global_scale", divide=True)
    if kind == "float":
        if bits != 8:
            unsupported("num_bits", bits, "8 of type float")
        if strategy == "block":
            return Fp8(*_block(weights.get("block_structure")))
        if strategy not in ("tensor", "channel"):
            unsupported("strategy", strategy, "tensor, channel, block")
        return Fp8(None if strategy == "tensor" else 1, None)
    if kind != "int" or not 1 <= bits <= 8:
        unsupported("num_bits", f"{bits} of type {kind}", "1 to 8 of type int, 8 of type float")
    if strategy not in ("tensor", "channel", "group"):
        unsupported("strategy", strategy, "tensor, channel, group")
    return Integers(
        bits,
        group if strategy == "group" else None,
        packed=form == "pack-quantized",
        per_tensor=strategy == "tensor",
        symmetric=weights.get("symmetric", True),
        act_order=weights.get("actorder") in ("group", True),
    )


def _block(structure: Any) -> tuple[int, int]:
    """Return the rows and columns of "128x128" or [128, 128]."""
    sizes = structure.split("x") if isinstance(structure, str) else structure
    try:
        rows, columns = (int(size) for size in sizes)
    except (TypeError, ValueError):
        unsupported("block_structure", structure, "[rows, columns]")
    return rows, columns
