"""GPTQ checkpoints (`quant_method` gptq): 2 to 8 bits with a scale and zero point per group of columns, and with
act-order (`desc_act`) a group for each column.

In the first version of the format (`checkpoint_format` gptq) zero points are stored less one. `dynamic` overrides bits
and group_size for the layers that a pattern names ("+:" or nothing before it), or leaves them plain ("-:").
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from quire.worker.layers.quantization.int_groups import Groups
from quire.worker.layers.quantization.packing import unpack_words
from quire.worker.layers.quantization.stored import (
    COLUMNS,
    ROWS,
    Axis,
    CheckpointFormat,
    IntegerGroups,
    Piece,
    Stored,
    grouped,
    named_by,
    signed,
    unsupported,
)

_FORMATS = ("gptq", "gptq_v2")
_OVERRIDES = {"bits", "group_size", "desc_act", "sym"}


class Gptq(IntegerGroups):
    """qweight `[in * bits / 32, out]`, qzeros `[groups, out * bits / 32]`, scales `[groups, out]`; with act-order g_idx
    `[in]`."""

    def __init__(self, bits: int, group: int | None, desc_act: bool, zero_step: int):
        super().__init__(bits, group, True, desc_act)
        self.zero_step = zero_step

    def tensors(self, piece: Piece) -> dict[str, Stored]:
        stored = {
            "values": Stored("qweight", (Axis(COLUMNS, 32, self.bits), Axis(ROWS)), torch.int32),
            "zeros": Stored("qzeros", (self.groups, Axis(ROWS, 32, self.bits)), torch.int32),
            "scales": Stored("scales", (self.groups, Axis(ROWS)), torch.float32),
        }
        return stored | ({"group_of": Stored("g_idx", (Axis(COLUMNS),), torch.int64)} if self.act_order else {})

    def decode(self, piece: Piece, tensors: dict[str, torch.Tensor]) -> Groups | torch.Tensor:
        words, zeros = tensors["values"].T, tensors["zeros"]
        values = unpack_words(words, self.bits, words.shape[1] * 32 // self.bits)
        values = signed(Axis(COLUMNS, 32, self.bits).trim(piece, values, 1), self.bits)
        zeros = unpack_words(zeros, self.bits, zeros.shape[1] * 32 // self.bits)
        # the sum wraps: a stored zero point of -1 is 2 ** bits - 1
        zeros = (zeros.int() + self.zero_step) & ((1 << self.bits) - 1) if self.zero_step else zeros.int()
        zeros = Axis(ROWS, 32, self.bits).trim(piece, zeros, 1).T - (1 << (self.bits - 1))
        scales, order = tensors["scales"].T.contiguous(), tensors.get("group_of")
        return grouped(piece, values, scales, zeros.float(), self.stored_bits, self.group, order)


class GptqFormat(CheckpointFormat):
    """The format of GPTQ. Raises ValueError for a setting that is not supported."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        form = config.get("checkpoint_format") or "gptq"
        if form not in _FORMATS:
            unsupported("checkpoint_format", form, ", ".join(_FORMATS))
        if config.get("is_marlin_format"):
            unsupported("is_marlin_format", True, "false")
        self.config, self.zero_step = config, int(form == "gptq")
        self.dynamic = config.get("dynamic") or {}
        self.skipped = config.get("modules_to_not_convert") or []
        self.weights = self._scheme({})
        self.overrides = {pattern: self._scheme(values) for pattern, values in self.dynamic.items() if values}

    def _scheme(self, overrides: dict[str, Any]) -> Gptq:
        if unknown := overrides.keys() - _OVERRIDES:
            unsupported("dynamic", ", ".join(sorted(unknown)), ", ".join(sorted(_OVERRIDES)))
        settings = {**self.config, **overrides}
        bits, group = settings.get("bits"), settings.get("group_size", 128)
        if bits not in range(2, 9):
            unsupported("bits", bits, "2 to 8")
        return Gptq(bits, None if group == -1 else group, bool(settings.get("desc_act")), self.zero_step)

    def scheme(self, name: str) -> Gptq | None:
        for pattern in self.dynamic:
            if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
                return None if pattern.startswith("-:") else self.overrides.get(pattern, self.weights)
        last = name.split(".")[-1]
        if last == "embed_tokens" or (last == "lm_head" and not self.config.get("lm_head")):
            return None
        return None if any(named_by(name, skip) for skip in self.skipped) else self.weights

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        prefix, _, suffix = name.rpartition(".")
        scheme = self.scheme(prefix) if suffix in ("bias", "g_idx") else None
        if scheme is None:
            return False
        # biases are written for layers without them too, and then zero; without act-order g_idx says nothing new
        return not read().any() if suffix == "bias" else not scheme.act_order
