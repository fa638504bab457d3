"""AWQ checkpoints (`quant_method` awq, `version` gemm): 4 bits with a scale and zero point per group of columns.

Words of 32 bits hold eight neighbouring outputs in an order of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.worker.layers.quantization.int_groups import Groups
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
    groups_bytes,
    named_by,
    unsupported,
)

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 .. 7 in a word; nibble j is output (0, 2, 4, 6, 1, 3, 5, 7)[j]
_WORD = Axis(ROWS, 8)


class Awq(Scheme):
    """qweight `[in, out / 8]`, qzeros `[in / group, out / 8]`, scales `[in / group, out]`."""

    def __init__(self, group: int | None, zeros: bool):
        self.group, self.zeros = group, zeros

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        groups = 1 if self.group is None else Axis(COLUMNS, self.group)
        stored = {
            "values": Stored("qweight", (Axis(COLUMNS), _WORD), torch.int32),
            "scales": Stored("scales", (groups, Axis(ROWS)), torch.float32),
        }
        if self.zeros:
            stored["zeros"] = Stored("qzeros", (groups, _WORD), torch.int32)
        return stored

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups | torch.Tensor:
        scales = tensors["scales"].T.contiguous()
        zeros = _signed(piece, tensors["zeros"]).float() if self.zeros else None
        return grouped(piece, _signed(piece, tensors["values"]), scales, zeros, 4, self.group)

    def num_bytes(self, piece: Piece, itemsize: int) -> int:
        return groups_bytes(piece, 4, self.group, 1 + self.zeros)


def _signed(piece: Piece, words: torch.Tensor) -> torch.Tensor:
    """int8 `[rows, entries]` of words `[entries, rows / 8]`, less 8."""
    codes = nibbles(words.contiguous().view(torch.uint8)).view(len(words), -1, 8)[:, :, _PLACES].flatten(1)
    return (_WORD.trim(piece, codes, 1).to(torch.int8) - 8).T.contiguous()


class AwqFormat(CheckpointFormat):
    """Raises:
    ValueError: a setting is not supported.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        if (version := config.get("version", "gemm")).lower() != "gemm":
            unsupported("version", version, "gemm")
        if (bits := config.get("bits", config.get("w_bit", 4))) != 4:
            unsupported("bits", bits, "4")
        group = config.get("group_size", config.get("q_group_size", 128))
        self.weights = Awq(None if group == -1 else group, config.get("zero_point", True))
        self.skipped = config.get("modules_to_not_convert") or []

    def scheme(self, name: str) -> Scheme | None:
        if name.split(".")[-1] in ("lm_head", "embed_tokens") or any(named_by(name, skip) for skip in self.skipped):
            return None
        return self.weights
