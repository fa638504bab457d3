"""Heads of checkpoints that predict the token after the next one (MTP), which draft tokens. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.worker.spec.model import ModelSpec, MTPSpec
from quire.worker.transformer.reader import text_part

# the head is a layer after the others, which has its parts next to those of a layer (DeepSeek V3, GLM-4.5)
AFTER_LAYERS = {
    "mtp.layers.0": "model.layers.{n}",
    "mtp.fc": "model.layers.{n}.eh_proj",
    "mtp.pre_fc_norm_embedding": "model.layers.{n}.enorm",
    "mtp.pre_fc_norm_hidden": "model.layers.{n}.hnorm",
    "mtp.norm": "model.layers.{n}.shared_head.norm",
}


class WithMTP:
    """Reads what config.json has of such a head; a mixin of `ConfigReader`, in front of it."""

    mtp_names: ClassVar[dict[str, str]] = AFTER_LAYERS
    mtp_key: ClassVar[str] = "num_nextn_predict_layers"
    mtp_hidden_first: ClassVar[bool] = False

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        spec, text = super().read_config(architecture, raw), text_part(raw)
        stored = text.get("quantization_config")
        if isinstance(stored, dict) and stored.get("quant_method") == "gguf":
            # the reader gives tensors the decoder's names
            count, names = "mtp.fc.weight" in stored.get("types", ()), {}
        else:
            count, names = text.get(cls.mtp_key), cls.mtp_names
        if not count or text.get("mtp_use_dedicated_embeddings"):
            return spec
        layer = next((one for one in reversed(spec.layers) if one.attends and not one.state), None)
        if layer is None:
            return spec
        placed = ((ours, theirs.format(n=len(spec.layers))) for ours, theirs in names.items())
        return replace(spec, mtp=MTPSpec(layer, tuple(placed), cls.mtp_hidden_first))
