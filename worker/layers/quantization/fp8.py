"""Weights of 8-bit floats (e4m3) with one scale per tensor, per output channel, or per block of e.g. 128 x 128.

`quant_method` fp8 (DeepSeek, Qwen3-FP8, AutoFP8), fbgemm_fp8, and the schemes of modelopt and compressed-tensors.
weight = e4m3 * scale, also where the tensor is called `weight_scale_inv`. Activations stay in the model's type, which
is more exact than the 8 bits they were calibrated for; so scales of activations are not needed. In bfloat16 on CPU the
weights stay in 8 bits, as groups whose values are e4m3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from quire.worker.layers.quantization.fp4 import Mxfp4
from quire.worker.layers.quantization.int_groups import E4M3, Groups
from quire.worker.layers.quantization.packing import e8m0
from quire.worker.layers.quantization.stored import (
    COLUMNS,
    ROWS,
    Axis,
    CheckpointFormat,
    Piece,
    Scheme,
    Stored,
    grouped,
    groups_needs,
    named_by,
    unsupported,
)

_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
_EXPONENTS = ("U8", "F8_E8M0")


class Fp8(Scheme):
    """e4m3 values and scales of `[rows, columns]` blocks, whose sizes are None where one scale serves all.

    `exponents`: scales are powers of two, stored as bytes (MXFP8).
    """

    def __init__(self, rows: int | None, columns: int | None, scale: str = "weight_scale", *, exponents: bool = False):
        self.rows, self.columns, self.scale, self.exponents = rows, columns, scale, exponents

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        rows = 1 if self.rows is None else Axis(ROWS, self.rows)
        columns = 1 if self.columns is None else Axis(COLUMNS, self.columns)
        dtype, types = (torch.uint8, _EXPONENTS) if self.exponents else (torch.float32, _SCALE_TYPES)
        return {
            "weight": Stored("weight", (Axis(ROWS), Axis(COLUMNS)), torch.float8_e4m3fn),
            "scale": Stored(self.scale, (rows, columns), dtype, types),
        }

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups | torch.Tensor:
        scale, weight = tensors["scale"], tensors["weight"]
        scale = e8m0(scale) if self.exponents else scale
        if self.rows and self.rows > 1:
            axis = Axis(ROWS, self.rows)
            scale = axis.trim(piece, scale.repeat_interleave(self.rows, 0), 0)
        scale = scale.expand(piece.rows[1], -1)
        if not bool((weight.view(torch.uint8) & 0x7F == 0x7F).any()):
            return grouped(piece, weight.clone(), scale, None, 8, self.columns)
        if self.columns:  # not finite, which kernels for groups do not expect
            scale = Axis(COLUMNS, self.columns).trim(piece, scale.repeat_interleave(self.columns, 1), 1)
        return weight.float() * scale

    def needs(self, piece: Piece) -> frozenset[str]:
        return frozenset({E4M3}) | groups_needs(self.columns)

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        n, k = piece.size
        return n * k + 4 * n * (1 if self.columns is None else -(-k // self.columns))


class Fp8Format(CheckpointFormat):
    """`quant_method` fp8 and fbgemm_fp8.

    Raises:
        ValueError: a setting is not supported.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.skipped = config.get("modules_to_not_convert") or config.get("ignored_layers") or []
        block, scale = config.get("weight_block_size"), config.get("scale_name", "weight_scale_inv")
        if config["quant_method"] == "fbgemm_fp8":
            self.weights = Fp8(1, None)
        elif block is None:
            self.weights = Fp8(None, None)
        elif isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
            self.weights = Fp8(*block, scale, exponents=config.get("scale_exponents", False))
        else:
            unsupported("weight_block_size", block, "[rows, columns]")
        if (experts := config.get("expert_dtype", "fp8")) not in ("fp8", "fp4"):
            unsupported("expert_dtype", experts, "fp8 or fp4")
        self.experts = Mxfp4("weight", scale) if experts == "fp4" else self.weights
        if (kind := config.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
            unsupported("fmt", kind, "e4m3")

    def scheme(self, name: str) -> Scheme | None:
        if name.split(".")[-1] in ("lm_head", "embed_tokens") or any(named_by(name, skip) for skip in self.skipped):
            return None
        return self.experts if ".experts." in name else self.weights

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        return bool(ACTIVATION_SCALES.search(name))


# Scales of activations, which stay wide, and of an 8-bit KV cache, which `kv_scales.py` reads.
ACTIVATION_SCALES = re.compile(
    r"\.(input_scale|input_scale_ub|input_zero_point|activation_scale|input_global_scale|output_scale|[qkv]_scale|"
    r"[qkv]_zero_point|prob_output_scale|kv_scale|act_scale)$"
)
