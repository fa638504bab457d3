"""Checkpoints of bitsandbytes: NF4 or FP4 with nested scales (`load_in_4bit`), and int8 (`load_in_8bit`).

4 bits: runs of 64 weights of the flattened matrix, high half of a byte first, share a scale; scales may in turn be
8-bit codes with a scale per 256 and an offset that a JSON text in the checkpoint holds. 8 bits: int8 * SCB / 127, with
an SCB per output.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from quire.worker.layers.linear import ANY_LENGTH
from quire.worker.layers.quantization.int_groups import TABLE, Groups
from quire.worker.layers.quantization.packing import nibbles
from quire.worker.layers.quantization.stored import (
    COLUMNS,
    ROWS,
    Axis,
    CheckpointFormat,
    Piece,
    Scheme,
    Stored,
    grouped,
    named_by,
    unsupported,
)

_FLOATS = ("F32", "BF16", "F16")
_BLOCK, _NESTED_BLOCK = 64, 256


class FourBits(Scheme):
    """The tensors of one weight are flat, so all of it is loaded and then sliced."""

    def __init__(self, kind: str, nested: bool):
        self.kind, self.nested = kind, nested

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        size = piece.shape[0] * piece.shape[1]
        blocks = -(-size // _BLOCK)
        stored = {
            "codes": Stored("weight", (-(-size // 2), 1), torch.uint8),
            "map": Stored("weight.quant_map", (16,), torch.float32),
            "state": Stored(f"weight.quant_state.bitsandbytes__{self.kind}", (ANY_LENGTH,), torch.uint8),
        }
        if not self.nested:
            return stored | {"absmax": Stored("weight.absmax", (blocks,), torch.float32)}
        return stored | {
            "absmax": Stored("weight.absmax", (blocks,), torch.uint8),
            "nested_absmax": Stored("weight.nested_absmax", (-(-blocks // _NESTED_BLOCK),), torch.float32),
            "nested_map": Stored("weight.nested_quant_map", (256,), torch.float32),
        }

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups | torch.Tensor:
        state = json.loads(bytes(tensors["state"].tolist()))
        sizes = state["blocksize"], state.get("nested_blocksize", _NESTED_BLOCK), tuple(state["shape"])
        if sizes != (_BLOCK, _NESTED_BLOCK, piece.shape):
            unsupported(f"{piece.name}: blocksize, nested_blocksize and shape", sizes, f"{_BLOCK}, {_NESTED_BLOCK}")
        scales = tensors["absmax"]
        if self.nested:
            nested = tensors["nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: len(scales)]
            scales = tensors["nested_map"][scales.long()] * nested + state["nested_offset"]
        n, k = piece.shape
        codes = nibbles(tensors["codes"].flatten(), low_first=False)[: n * k]
        if k % _BLOCK:  # runs that straddle rows
            weight = tensors["map"][codes.long()] * scales.repeat_interleave(_BLOCK)[: n * k]
            return weight.view(n, k).narrow(0, *piece.rows).narrow(1, *piece.columns)
        values = (codes.to(torch.int8) - 8).view(n, k).narrow(0, *piece.rows).narrow(1, *piece.columns).contiguous()
        scales = scales.view(n, -1).narrow(0, *piece.rows).narrow(1, *Axis(COLUMNS, _BLOCK).covered(piece))
        return grouped(piece, values, scales, None, 4, _BLOCK, table=tuple(tensors["map"].tolist()))

    def needs(self, piece: Piece) -> frozenset[str]:
        return frozenset({TABLE})

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        n, k = piece.size
        return n * k // 2 + 4 * n * -(-k // _BLOCK)


class EightBits(Scheme):
    def tensors(self, piece: Piece) -> dict[str, Stored]:
        return {
            "values": Stored("weight", (Axis(ROWS), Axis(COLUMNS)), torch.int8),
            "scales": Stored("SCB", (Axis(ROWS),), torch.float32, _FLOATS),
        }

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups:
        return Groups(tensors["values"].clone(), tensors["scales"][:, None] / 127, None, 8, piece.columns[1])

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        return piece.rows[1] * (piece.columns[1] + 2)


class BitsAndBytesFormat(CheckpointFormat):
    """The formats of bitsandbytes. Raises ValueError for a setting that is not supported."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        if config.get("load_in_8bit"):
            self.weights: Scheme = EightBits()
        elif config.get("load_in_4bit"):
            kind = config.get("bnb_4bit_quant_type", "fp4")
            if kind not in ("nf4", "fp4"):
                unsupported("bnb_4bit_quant_type", kind, "nf4, fp4")
            if (storage := config.get("bnb_4bit_quant_storage", "uint8")) != "uint8":
                unsupported("bnb_4bit_quant_storage", storage, "uint8")
            self.weights = FourBits(kind, config.get("bnb_4bit_use_double_quant", False))
        else:
            unsupported("load_in_4bit, load_in_8bit", False, "one of them")
        self.skipped = config.get("llm_int8_skip_modules") or ["lm_head"]

    def scheme(self, name: str) -> Scheme | None:
        last = name.split(".")[-1]
        if last in ("lm_head", "embed_tokens") or any(named_by(name, skip) for skip in self.skipped):
            return None
        return self.weights

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        return name.endswith(".weight_format")
