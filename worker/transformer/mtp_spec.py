"""Heads of checkpoints that predict tokens after the next one (MTP), which draft tokens. Torch-free."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, ClassVar

from quire.worker.spec.model import LayerSpec, ModelSpec, MTPSpec
from quire.worker.transformer.reader import text_part

# names of the parts of head {i}, where {n} is the number of layers and {i}: it is a layer after the others, which has
# its parts next to those of a layer (DeepSeek V3, GLM-4.5)
AFTER_LAYERS = {
    "layer": "model.layers.{n}",
    "fc": "model.layers.{n}.eh_proj",
    "pre_fc_norm_embedding": "model.layers.{n}.enorm",
    "pre_fc_norm_hidden": "model.layers.{n}.hnorm",
    "norm": "model.layers.{n}.shared_head.norm",
}


class WithMTP:
    """Reads the keys of such heads in config.json; a mixin of `ConfigReader`, in front of it."""

    mtp_names: ClassVar[dict[str, str]] = AFTER_LAYERS
    mtp_key: ClassVar[str] = "num_nextn_predict_layers"
    mtp_hidden_first: ClassVar[bool] = False
    mtp_default: ClassVar[int | None] = None  # number of heads if config.json does not say it

    @classmethod
    def mtp_layer(cls, spec: ModelSpec) -> LayerSpec | None:
        """Return the layer of each head, None if the heads are not known. It attends to all keys: an index would only
        change what is drafted.
        """
        last = next((one for one in reversed(spec.layers) if one.attends and not one.state), None)
        return last and replace(last, index=None)

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        spec, text = super().read_config(architecture, raw), text_part(raw)
        stored = text.get("quantization_config")
        if isinstance(stored, dict) and stored.get("quant_method") == "gguf":
            # the reader gives tensors the decoder's names
            types = stored.get("types", ())
            count, names = next(i for i in itertools.count() if f"mtp.{i}.fc.weight" not in types), {}
        else:
            count, names = text.get(cls.mtp_key, cls.mtp_default), cls.mtp_names
            if count is not None and not isinstance(count, int):
                raise ValueError(f"{cls.mtp_key} must be a whole number, not {count!r}")
        if not count or text.get("mtp_use_dedicated_embeddings"):
            return spec
        layer = cls.mtp_layer(spec)
        if layer is None:
            return spec
        placed = (
            (f"mtp.{i}.{ours}", theirs.format(i=i, n=len(spec.layers) + i))
            for i in range(count)
            for ours, theirs in names.items()
        )
        return replace(spec, mtp=MTPSpec(layer, tuple(placed), cls.mtp_hidden_first, count))
