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
    IntegerGroups,
    Piece,
    Scheme,
    Stored,
    grouped,
    named_by,
    unsupported,
)

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # for outputs 0 .. 7 in a word; nibble j is output (0, 2, 4, 6, 1, 3, 5, 7)[j]
_NAMES = "qweight", "scales", "qzeros"
_WORD = Axis(ROWS, 8)


class Awq(IntegerGroups):
    """qweight `[in, out / 8]`, scales `[in / group, out]`, qzeros `[in / group, out / 8]`, by these or other `names`.

    `in_order`: words hold outputs from the low bits on; `signed`: in two's complement.
    """

    def __init__(
        self,
        group: int | None,
        zeros: bool,
        *,
        names: tuple[str, str, str] = _NAMES,
        in_order: bool = False,
        signed: bool = False,
    ):
        super().__init__(4, group, zeros)
        self.names, self.signed = names, signed
        self.places = list(range(8)) if in_order else _PLACES

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        values, scales, zeros = self.names
        stored = {
            "values": Stored(values, (Axis(COLUMNS), _WORD), torch.int32),
            "scales": Stored(scales, (self.groups, Axis(ROWS)), torch.float32),
        }
        if self.has_zeros:
            stored["zeros"] = Stored(zeros, (self.groups, _WORD), torch.int32)
        return stored

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups | torch.Tensor:
        scales = tensors["scales"].T.contiguous()
        zeros = self._unpacked(piece, tensors["zeros"]).float() if self.has_zeros else None
        return grouped(piece, self._unpacked(piece, tensors["values"]), scales, zeros, self.stored_bits, self.group)

    def _unpacked(self, piece: Piece, words: torch.Tensor) -> torch.Tensor:
        """Return int8 `[rows, entries]` of words `[entries, rows / 8]`; of unsigned ones, less 8."""
        codes = nibbles(words.contiguous().view(torch.uint8)).view(len(words), -1, 8)[:, :, self.places].flatten(1)
        codes = codes ^ 8 if self.signed else codes
        return (_WORD.trim(piece, codes, 1).to(torch.int8) - 8).T.contiguous()


class AwqFormat(CheckpointFormat):
    """The format of AWQ. Raises ValueError for a setting that is not supported."""

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
