"""Storage of keys and values: in the type of the activations, or in 8 bits with scales.

`--kv-cache-dtype auto` follows the checkpoint, as vLLM does: a model that was exported for an FP8 or int8 cache gets
one. Scales of the checkpoint are used if every layer has them; otherwise each head of each token gets its own when it
is stored, which loses less and takes 4 bytes. The two parts of a latent (MLA) count as two heads. A checkpoint has one
scale for both, which suits e4m3, whose precision is relative, but not integers: the smaller part would keep few bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.configs.config import Config
from quire.worker.attention.scaled import FP8, LARGEST, SCALE
from quire.worker.layers.quantization.kv_scales import Declared, Scales, declared, read_scales
from quire.worker.spec.model import ModelSpec

_TYPES = {"fp8": FP8, "int8": torch.int8}
_OWN_SCALES = "_per_token_head"
Choice = tuple[str, str, str]  # setting, value, reason


@dataclass(frozen=True, slots=True)
class KVStorage:
    """The type of the elements, and the constant scales of each layer, if any."""

    dtype: torch.dtype
    constants: Scales | None = None

    @property
    def scaled(self) -> bool:
        """Return whether elements have scales."""
        return self.dtype in LARGEST

    @property
    def scale_bytes(self) -> int:
        """Return the bytes per head of a token for the scale of its key; its value has as many."""
        return SCALE.itemsize if self.scaled and self.constants is None else 0

    @property
    def scales(self) -> str | None:
        """Return "token" for a scale per head of a token, "layer" for constants of the layer, None for no scales."""
        if not self.scaled:
            return None
        return "token" if self.constants is None else "layer"


def resolve_storage(config: Config, spec: ModelSpec, dtype: torch.dtype) -> tuple[KVStorage, Choice]:
    """Return (storage, row in the table of choices) for activations of type `dtype`.

    Raises:
        ValueError: `--kv-cache-dtype` does not fit the model.
    """
    asked, name = config.cache.kv_cache_dtype, str(dtype).removeprefix("torch.")
    wanted, obstacle = declared(spec.raw), _obstacle(spec)
    if asked == "auto":
        if wanted and wanted.kind and not obstacle:
            return _in_8_bits(config, spec, wanted.kind, wanted, f"the checkpoint's {wanted.words}")
        reason = obstacle or "fp8 and int8 are supported"
        why = f"; the checkpoint's {wanted.words} is not followed: {reason}" if wanted else ""
        return KVStorage(dtype), ("kv_cache_dtype", name, f"type of the activations{why}")
    if asked.removesuffix(_OWN_SCALES) in _TYPES:
        if obstacle:
            raise ValueError(f"--kv-cache-dtype {asked}: {obstacle}; omit it")
        return _in_8_bits(config, spec, asked, wanted, "as asked")
    if asked != name:
        raise ValueError(
            f"--kv-cache-dtype {asked}: keys and values are stored in {name}, the type of the activations, or in 8 "
            f"bits; set it to auto, fp8 or int8, or set --dtype {asked}"
        )
    return KVStorage(dtype), ("kv_cache_dtype", name, "as asked")


def _obstacle(spec: ModelSpec) -> str | None:
    """Return the reason why a model's cache cannot be stored in 8 bits, None if it can."""
    if any(layer.compressed for layer in spec.layers):
        return f"compressed keys, as of {spec.architecture}, are not stored in 8 bits"
    return f"{spec.architecture} is an encoder, which keeps no keys and values" if spec.is_encoder else None


def _in_8_bits(
    config: Config, spec: ModelSpec, asked: str, wanted: Declared | None, why: str
) -> tuple[KVStorage, Choice]:
    kind, latent = asked.removesuffix(_OWN_SCALES), any(layer.latent for layer in spec.layers)
    own, note = (KVStorage(_TYPES[kind]), ("kv_cache_dtype", kind)), "one scale per token and head"
    if latent:
        note = "two scales per token, of its latent and of its rotary key"
    if asked != kind:
        return own[0], (*own[1], f"{why}; {note}")
    # a scale for another type does not fit this one's range
    if config.model.load_format == "dummy" or (wanted and wanted.kind != kind) or (not wanted and kind != "fp8"):
        return own[0], (*own[1], f"{why}; {note}")
    if latent and kind == "int8":
        return own[0], (*own[1], f"{why}; {note}, as one of the checkpoint for both would leave the smaller few bits")
    scales = read_scales(config.model.model, latent)
    if scales is None:
        return own[0], (*own[1], f"{why}; {note}, unless the weights, which are not here, have some")
    lacking = [
        i
        for i, layer in enumerate(spec.layers)
        if layer.attends and layer.mixer != "bidirectional" and layer.kv_from is None and i not in scales
    ]
    if not lacking:
        return KVStorage(_TYPES[kind], scales), (*own[1], f"{why}; the checkpoint's scale of each layer")
    if scales:
        note += f", as the checkpoint has none of layer {lacking[0]}"
    return own[0], (*own[1], f"{why}; {note}")
