"""Checkpoints of Intel's AutoRound (`quant_method` auto-round): integers in the layouts of GPTQ and AWQ, which
`packing_format` names.

`extra_config` overrides bits, group_size and sym for the layers that it names or that match a pattern (16 bits: plain);
`block_name_to_quantize` names the blocks that are quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.worker.layers.quantization.awq import Awq
from quire.worker.layers.quantization.gptq import Gptq
from quire.worker.layers.quantization.stored import CheckpointFormat, Scheme, named_by, unsupported

_OVERRIDES = {"bits", "group_size", "sym", "data_type"}
_ACTIVATIONS = re.compile(r"act_\w+|super_\w+|scale_dtype|rotation_config|in_blocks|fixed_by_user")
_PATTERN_CHARACTERS = set("*+?^$()[]{}|\\")


class AutoRoundFormat(CheckpointFormat):
    """The format of AutoRound. Raises ValueError for a setting that is not supported."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        self.packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
        if config.get("rotation_config"):
            unsupported("rotation_config", config["rotation_config"], "none")
        if (bits := config.get("act_bits") or 16) < 16:
            unsupported("act_bits", bits, "16")
        names = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
        names = names.split(",") if isinstance(names, str) else names or []
        self.blocks = [name.strip() for entry in names for name in (entry if isinstance(entry, list) else [entry])]
        self.weights = self._scheme({})
        extra = config.get("extra_config") or {}
        self.overrides = {name: self._scheme(values) for name, values in extra.items()}

    def _scheme(self, overrides: dict[str, Any]) -> Scheme | None:
        unknown = [key for key in overrides if key not in _OVERRIDES and not _ACTIVATIONS.fullmatch(key)]
        if unknown:
            unsupported("extra_config", ", ".join(sorted(unknown)), ", ".join(sorted(_OVERRIDES)))
        settings = self.config | {key: value for key, value in overrides.items() if value is not None}
        bits, group = settings.get("bits"), settings.get("group_size", 128)
        if bits == 16:
            return None
        if (kind := settings.get("data_type", "int")) not in ("int", "int_asym"):
            unsupported("data_type", kind, "int")
        if bits not in range(2, 9):
            unsupported("bits", bits, "2 to 8, 16")
        if not isinstance(group, int):
            unsupported("group_size", group, "a number of columns")
        group = None if group == -1 else group
        if "awq" in self.packing:
            if bits != 4:
                unsupported(f"bits with packing_format {self.packing}", bits, "4")
            return Awq(group, zeros=True)
        if self.packing == "auto_round" or "gptqmodel" in self.packing:
            return Gptq(bits, group, desc_act=False, zero_step=0)
        if "gptq" in self.packing:
            return Gptq(bits, group, desc_act=False, zero_step=1)
        unsupported(
            "packing_format",
            self.packing,
            "auto_round, auto_round:auto_gptq, auto_round:gptqmodel, auto_round:auto_awq",
        )

    def find(self, name: str) -> Scheme | None:
        return self._find(self.modules(name))

    def scheme(self, name: str) -> Scheme | None:
        return self._find([name])

    def _find(self, names: Sequence[str]) -> Scheme | None:
        """Return the scheme of the weight that has these names, one of which the settings may use."""
        for key, scheme in self.overrides.items():
            if any(name == key or name.endswith(f".{key}") for name in names):
                return scheme
        for key, scheme in self.overrides.items():
            if _PATTERN_CHARACTERS & set(key) and any(re.search(key, name) for name in names):
                return scheme
        if names[0].split(".")[-1] in ("lm_head", "embed_tokens"):
            return None
        if self.blocks and not any(named_by(name, block) for name in names for block in self.blocks):
            return None
        return self.weights

    def ignores(self, name: str, read: Callable[[], torch.Tensor]) -> bool:
        return name.endswith(".g_idx") and self.scheme(name.removesuffix(".g_idx")) is not None
