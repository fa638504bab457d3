"""What a Hugging Face `config.json` says about a model, with the defaults that transformers gives each architecture. Torch-free.

Both generations of files are read: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). What cannot be served is
refused here, by name, before anything is loaded.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.configs.files import damaged_weights, unreadable

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Values of keys that a config.json leaves out: those of the configuration classes of transformers.
_COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "num_hidden_layers": 32, "num_attention_heads": 32,
                    "hidden_size": 4096, "head_dim": None, "attention_bias": False, "attention_out_bias": False, "mlp_bias": False}
_QWEN_DEFAULTS = _COMMON_DEFAULTS | {"model_type": "qwen2", "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
                                     "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _COMMON_DEFAULTS | {"model_type": "llama", "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
                                            "max_position_embeddings": 2048, "sliding_window": None},
    "MistralForCausalLM": _COMMON_DEFAULTS | {"model_type": "mistral", "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
                                              "max_position_embeddings": 131072, "sliding_window": 4096},
    "Qwen2ForCausalLM": _QWEN_DEFAULTS | {"attention_bias": True},
    "Qwen3ForCausalLM": _QWEN_DEFAULTS | {"model_type": "qwen3", "head_dim": 128},
}
ARCHITECTURES = tuple(_DEFAULTS)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape. Sizes are those of the whole model, not of a rank."""

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
    rope_scaling: dict[str, Any] | None  # None: plain; else rope_type is linear, llama3 or yarn, and its numbers are all there
    tie_word_embeddings: bool
    attention_bias: bool  # of q, k and v
    attention_out_bias: bool
    mlp_bias: bool
    hidden_act: str
    sliding_window: int | None
    layer_types: tuple[str, ...]  # per layer: full_attention or sliding_attention
    dtype: str  # of the weights in the files: float32, bfloat16 or float16
    raw: dict[str, Any]

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens. Scaling that stretches positions stretches it too, except where `max_position_embeddings` already counts it (llama3)."""
        scaling = self.rope_scaling
        if scaling is None or scaling["rope_type"] == "llama3":
            return self.max_position_embeddings
        if scaling["rope_type"] == "yarn":
            return max(self.max_position_embeddings, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
        return int(self.max_position_embeddings * scaling["factor"])

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of a layer, None if it sees everything."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


def read_model_spec(folder: str) -> ModelSpec:
    """Read `folder/config.json`.

    Raises:
        ValueError: there is no readable config.json, the architecture is not one of ARCHITECTURES, or it asks for something that is not supported.
    """
    path = Path(folder, "config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the model configuration cannot be had: {unreadable(path, error)}") from error
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"cannot read the model configuration {path}: {error}; download it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    spec = parse_model_spec(raw)
    return spec if spec.dtype else replace(spec, dtype=_dtype_of_weights(folder))


def parse_model_spec(raw: dict[str, Any]) -> ModelSpec:
    """The spec of a parsed config.json. `dtype` is "" where the file names none. Raises ValueError as `read_model_spec` does."""
    architecture = _architecture(raw)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"the weights are quantized (quantization_config: {method}), which is not supported yet")
    values = _DEFAULTS[architecture] | {key: raw[key] for key in _DEFAULTS[architecture] if key in raw}
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        values["attention_out_bias"] = values["attention_bias"]  # one key for all four projections
    elif architecture == "Qwen2ForCausalLM":
        values |= {"attention_bias": True, "attention_out_bias": False}  # fixed, whatever the file says
    else:
        values |= {"attention_bias": False, "attention_out_bias": False}
    if architecture != "LlamaForCausalLM":
        values["mlp_bias"] = False
    _complete_heads(values)
    if values["hidden_act"] != "silu":
        raise ValueError(f"hidden_act {values['hidden_act']!r} is not supported (silu is)")
    rope_theta, rope_scaling = _rope(raw, values["max_position_embeddings"])
    window, layer_types = _windows(architecture, values, raw)
    return ModelSpec(
        architecture=architecture, rope_theta=rope_theta, rope_scaling=rope_scaling, dtype=_dtype(raw), raw=raw, sliding_window=window, layer_types=layer_types,
        **{key: value for key, value in values.items() if key not in ("sliding_window", "use_sliding_window", "max_window_layers")})


def num_layer_weights(spec: ModelSpec) -> int:
    """Number of weights in the matrices of all layers."""
    q_size, kv_size = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    return spec.num_hidden_layers * spec.hidden_size * (2 * q_size + 2 * kv_size + 3 * spec.intermediate_size)


def num_parameters(spec: ModelSpec) -> int:
    """Number of weights; tied embeddings count once."""
    hidden, q_size, kv_size = spec.hidden_size, spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    biases = spec.attention_bias * (q_size + 2 * kv_size) + spec.attention_out_bias * hidden + spec.mlp_bias * (2 * spec.intermediate_size + hidden)
    norms = 2 * hidden + (2 * spec.head_dim if spec.architecture == "Qwen3ForCausalLM" else 0)
    embeddings = spec.vocab_size * hidden * (1 if spec.tie_word_embeddings else 2)
    return num_layer_weights(spec) + spec.num_hidden_layers * (biases + norms) + embeddings + hidden


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int, tp: int = 1) -> int:
    """Bytes of keys and values that one token takes on each of `tp` ranks, over all layers. KV heads are replicated when there are fewer than ranks."""
    return spec.num_hidden_layers * 2 * max(1, spec.num_key_value_heads // tp) * spec.head_dim * dtype_bytes


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in _DEFAULTS:
            return name
    named = ", ".join(names) if names else "none named in config.json"
    raise ValueError(f"architecture not supported: {named}. Supported: {', '.join(ARCHITECTURES)}")


def _complete_heads(values: dict[str, Any]) -> None:
    """Fill in what follows from other sizes, and check that the sizes fit. Changes `values`."""
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                "max_position_embeddings"):
        if (not isinstance(values[key], int) or values[key] < 1) and (key, values[key]) != ("head_dim", None):
            raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
    heads = values["num_attention_heads"]
    if values["head_dim"] is None:
        if values["hidden_size"] % heads:
            raise ValueError(f"hidden_size {values['hidden_size']} is not a multiple of num_attention_heads {heads}")
        values["head_dim"] = values["hidden_size"] // heads
    if heads % values["num_key_value_heads"]:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {values['num_key_value_heads']}")
    if values["head_dim"] % 2:
        raise ValueError(f"head_dim {values['head_dim']} must be even for rotary embeddings")


def _rope(raw: dict[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """`(rope_theta, rope_scaling)` from either generation of keys; the scaling's own defaults are filled in."""
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
        original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_positions
        rope["original_max_position_embeddings"] = original
    if rope_type == "yarn" and rope.get("factor") is None:
        rope["factor"] = max_positions / rope["original_max_position_embeddings"]
    for key in ("factor", *(("low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ())):
        if not isinstance(rope.get(key), int | float) or rope[key] <= 0:
            raise ValueError(f"rope_type {rope_type!r} needs a positive number {key!r}, not {rope.get(key)!r}")
    return theta, {"rope_type": rope_type, **rope}


def _windows(architecture: str, values: dict[str, Any], raw: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window and which layers have it: all of Mistral's, those from `max_window_layers` on (or listed in `layer_types`) of Qwen's."""
    num_layers = values["num_hidden_layers"]
    window = values["sliding_window"] if values.get("use_sliding_window", True) else None
    if architecture == "LlamaForCausalLM":
        window = None  # Llama knows no window, whatever the file says
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window must be a positive integer or null, not {window!r}")
    if architecture.startswith("Qwen") and raw.get("layer_types"):
        types = tuple(raw["layer_types"])
    else:
        first = values.get("max_window_layers", 0)
        types = tuple("sliding_attention" if window is not None and layer >= first else "full_attention" for layer in range(num_layers))
        if architecture == "MistralForCausalLM" and tuple(raw.get("layer_types") or types) != types:
            raise ValueError("layer_types that mix attention kinds are not supported for MistralForCausalLM")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != num_layers:
        raise ValueError(f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers, found {len(types)}: {sorted(set(types))}")
    if "sliding_attention" not in types:
        window = None
    elif window is None:
        raise ValueError("layer_types names sliding_attention but there is no sliding_window (or use_sliding_window is false)")
    return window, types


def _dtype(raw: dict[str, Any]) -> str:
    dtype = (raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
    if dtype and dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def _dtype_of_weights(folder: str) -> str:
    """The dtype of the first weight in the files, as transformers decides when config.json names none; float32 if there are no weights either."""
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
