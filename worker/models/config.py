"""The parts of `config.json` that all families share: sizes, rotary embeddings, dtypes. Torch-free. Facts about a
family are in its own file.

Reads both generations of files: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers
5). Unsupported settings are rejected here, by name, before weights are loaded.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.configs.files import damaged_weights, unreadable
from quire.worker.cache.spec import CacheSpec, Full, Window

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Defaults of keys that config.json omits, common to the configuration classes of transformers.
COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "head_dim": None,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Parameters that may differ from layer to layer."""

    window: int | None = None  # number of positions that a token attends to, None for all
    scale: float | None = None  # scale of attention scores, None for head_dim**-0.5
    soft_cap: float | None = None  # of attention scores


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder. Sizes are those of the whole model, not of a rank."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    # None: unscaled; else rope_type is linear, llama3 or yarn, and all its numbers are present
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool  # bias of q, k and v
    attention_out_bias: bool
    mlp_bias: bool
    hidden_act: str
    layers: tuple[LayerSpec, ...]
    dtype: str  # dtype of the weights in the files: float32, bfloat16 or float16
    raw: dict[str, Any]

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens.

        Scaling that stretches positions also stretches the context, unless `max_position_embeddings` already includes
        it (llama3).
        """
        scaling = self.rope_scaling
        if scaling is None or scaling["rope_type"] == "llama3":
            return self.max_position_embeddings
        if scaling["rope_type"] == "yarn":
            return max(
                self.max_position_embeddings, int(scaling["original_max_position_embeddings"] * scaling["factor"])
            )
        return int(self.max_position_embeddings * scaling["factor"])


def read_config(folder: str) -> dict[str, Any]:
    """Parse `folder/config.json`. Raises ValueError if it is missing or unreadable."""
    path = Path(folder, "config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"no model configuration: {unreadable(path, error)}") from error
    except ValueError as error:  # invalid JSON or UTF-8
        raise ValueError(f"cannot read the model configuration {path}: {error}; download it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return raw


def make_spec(
    architecture: str, values: dict[str, Any], layers: tuple[LayerSpec, ...], raw: dict[str, Any]
) -> ModelSpec:
    """Build the spec of a family. `values` has the keys of COMMON_DEFAULTS and the sizes, with defaults filled in and
    sizes checked; `raw` is the config.json.

    Raises ValueError for settings that no family supports.
    """
    if values["hidden_act"] != "silu":
        raise ValueError(f"hidden_act {values['hidden_act']!r} is not supported; supported: silu")
    rope_theta, rope_scaling = _rope(raw, values["max_position_embeddings"])
    fields = {field.name for field in dataclasses.fields(ModelSpec)}
    return ModelSpec(
        architecture=architecture,
        layers=layers,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        dtype=_dtype(raw),
        raw=raw,
        **{key: value for key, value in values.items() if key in fields},
    )


def layer_specs(window: int | None, layer_types: Sequence[str], num_layers: int) -> tuple[LayerSpec, ...]:
    """Return one spec per entry of `layer_types`: full_attention, or sliding_attention with `window`.

    Raises ValueError for another name or another number of layers.
    """
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window must be a positive integer or null, not {window!r}")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != num_layers:
        raise ValueError(
            f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers, "
            f"found {len(layer_types)}: {sorted(set(layer_types))}"
        )
    if "sliding_attention" in layer_types and window is None:
        raise ValueError(
            "layer_types names sliding_attention but there is no sliding_window (or use_sliding_window is false)"
        )
    return tuple(LayerSpec(window if kind == "sliding_attention" else None) for kind in layer_types)


def cache_specs(spec: ModelSpec, itemsize: int, tp: int = 1) -> list[CacheSpec]:
    """Return the cache spec of each layer on each of `tp` ranks, with elements of `itemsize` bytes.

    KV heads are replicated if there are fewer KV heads than ranks.
    """
    sizes = max(1, spec.num_key_value_heads // tp), spec.head_dim, spec.head_dim, itemsize
    return [Full(*sizes) if layer.window is None else Window(*sizes, layer.window) for layer in spec.layers]


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int, tp: int = 1) -> int:
    """Bytes of keys and values per token on each of `tp` ranks, over all layers.

    KV heads are replicated if there are fewer KV heads than ranks.
    """
    return spec.num_hidden_layers * 2 * max(1, spec.num_key_value_heads // tp) * spec.head_dim * dtype_bytes


def complete_sizes(values: dict[str, Any]) -> None:
    """Fill in sizes that follow from other sizes, and check that they are consistent.

    Changes `values`. Raises ValueError naming the key.
    """
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ):
        if (not isinstance(values[key], int) or values[key] < 1) and (key, values[key]) != ("head_dim", None):
            raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
    heads = values["num_attention_heads"]
    if values["head_dim"] is None:
        if values["hidden_size"] % heads:
            raise ValueError(f"hidden_size {values['hidden_size']} is not a multiple of num_attention_heads {heads}")
        values["head_dim"] = values["hidden_size"] // heads
    if heads % values["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {values['num_key_value_heads']}"
        )
    if values["head_dim"] % 2:
        raise ValueError(f"head_dim {values['head_dim']} must be even for rotary embeddings")


def _rope(raw: dict[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """Return `(rope_theta, rope_scaling)` from either generation of keys, with the scaling's own defaults filled in."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope parameters that differ from layer to layer are not supported")
    rope_type = rope.pop("type", None)
    rope_type = rope.pop("rope_type", rope_type) or "default"
    theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if rope_type == "default":
        return theta, None
    if rope_type in ("llama3", "yarn"):
        original = (
            raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_positions
        )
        rope["original_max_position_embeddings"] = original
    if rope_type == "yarn" and rope.get("factor") is None:
        rope["factor"] = max_positions / rope["original_max_position_embeddings"]
    for key in ("factor", *(("low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ())):
        if not isinstance(rope.get(key), int | float) or rope[key] <= 0:
            raise ValueError(f"rope_type {rope_type!r} needs a positive number {key!r}, not {rope.get(key)!r}")
    return theta, {"rope_type": rope_type, **rope}


def _dtype(raw: dict[str, Any]) -> str:
    dtype = (raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
    if dtype and dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def dtype_of_weights(folder: str) -> str:
    """Return the dtype of the first weight in the files, as transformers does if config.json names none; float32 if
    there are no weights either.
    """
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, path.stat().st_size)))
        except (OSError, struct.error, ValueError) as error:
            raise ValueError(damaged_weights(path, error)) from error
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[entry["dtype"]]
    return "float32"
