"""Read a config.json: the keys that a family uses, their defaults, legacy spellings and checks. Torch-free.

Unsupported settings are rejected here, by name, before weights are loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from quire.checkpoints.config_schema import TEXT_PARTS
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.rope import RopeSpec, read_ropes

FULL, SLIDING = "full_attention", "sliding_attention"
STATE = "linear_attention"  # layers with a recurrent state
# errors of arithmetic with values of config.json that are of another kind than expected
_UNFIT = (TypeError, AttributeError, ArithmeticError, LookupError)
_DTYPES = ("float32", "bfloat16", "float16")
_STATE_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_INHERITED = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config", "bos_token_id", "eos_token_id")

GATED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
# names of keys in some families' config.json, and the names used here
ALIASES = {
    "norm_eps": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
    "hidden_activation": "hidden_act",
    "activation_function": "hidden_act",
}

# Defaults of keys that config.json omits, common to the configuration classes of transformers.
COMMON_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_size": 4096,
    "head_dim": None,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "layer_types": None,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json: a wrapper's text part, or all of it.

    The part inherits keys that it lacks, such as `tie_word_embeddings`, from the wrapper.
    """
    part = next((raw[key] for key in TEXT_PARTS if isinstance(raw.get(key), dict)), None)
    if part is None:
        return raw
    return {key: raw[key] for key in _INHERITED if raw.get(key) is not None} | {
        key: value for key, value in part.items() if value is not None or key not in _INHERITED
    }


class ConfigReader:
    """Reads the config.json of a family, whose class overrides the attributes and methods below."""

    # keys of config.json that are read, with their defaults
    config_defaults: ClassVar[dict[str, Any]] = COMMON_DEFAULTS
    # other names of these keys in config.json
    aliases: ClassVar[dict[str, str]] = ALIASES
    # activations of a gated MLP
    gated_activations: ClassVar[tuple[str, ...]] = GATED_ACTIVATIONS
    # fields of ModelSpec and LayerSpec that are the same for every model of the family, whatever config.json says
    facts: ClassVar[dict[str, Any]] = {}
    # for a family with recurrent states: names of layer types in config.json, and the kinds that they stand for
    state_kinds: ClassVar[dict[str, str]] = {}

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        """Return the spec of a parsed config.json. Raises ValueError, naming the key, for unsupported settings."""
        raw = text_part(raw)
        for key in ("rope_scaling", "rope_parameters"):
            if raw.get(key) and not isinstance(raw[key], dict):
                raise ValueError(f"{key} must be an object, not {raw[key]!r}")
        try:
            return cls._read(architecture, raw)
        except _UNFIT as error:
            if (key := cls._unfit(architecture, raw)) is None:
                raise
            raise ValueError(f"{key} {raw[key]!r} does not fit {architecture}: {error}") from error

    @classmethod
    def _unfit(cls, architecture: str, raw: dict[str, Any]) -> str | None:
        """Return the key without which config.json can be read or, if there is none, is refused for another reason."""
        refused = None
        for key in raw:
            try:
                cls._read(architecture, {name: raw[name] for name in raw if name != key})
            except _UNFIT:
                continue
            except ValueError:
                refused = refused or key
                continue
            return key
        return refused

    @classmethod
    def _read(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        values = {"rope_interleaved": False} | cls.config_defaults
        for key, value in raw.items():
            if (key := cls.aliases.get(key, key)) in cls.config_defaults:
                values[key] = value
        values |= cls.facts
        cls.complete(values, raw)
        complete_sizes(values)
        activations = PLAIN_ACTIVATIONS if values.get("mlp") == "plain" else cls.gated_activations
        if values["hidden_act"] not in activations:
            raise ValueError(
                f"hidden_act {values['hidden_act']!r} is not supported; supported: {', '.join(activations)}"
            )
        ropes = cls.ropes(values, raw)
        layers = cls.layer_specs(values, raw, ropes)
        if any(layer.state for layer in layers):
            _check_state_dtype(raw)
        fields = {field.name for field in dataclasses.fields(ModelSpec)}
        lengths = {"max_model_len": cls.context_length(values, ropes)}
        own = {"architecture": architecture, "raw": raw, "ropes": ropes, "layers": layers, "dtype": _dtype(raw)}
        return ModelSpec(
            norm_eps=values["rms_norm_eps"], **lengths | {k: v for k, v in values.items() if k in fields} | own
        )

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        """Adapt `values` (defaults, overridden by `raw` and `facts`) to the family's meaning of the keys."""

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        """Return the model's rotary embeddings by name: "default", or attention kinds."""
        return read_ropes(values, raw)

    @classmethod
    def context_length(cls, values: dict[str, Any], ropes: dict[str, RopeSpec]) -> int:
        """Return the longest context in tokens; by default that of the layers with full attention."""
        rope = ropes.get(FULL) or ropes.get("default")
        return rope.context_length() if rope else values["max_position_embeddings"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        """Return the attention kind of each layer if config.json does not list them."""
        return [FULL] * values["num_hidden_layers"]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        """Adapt the spec of layer `index`, which has its attention kind's window and rotary embedding."""
        return layer

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        """Return one spec per layer."""
        kinds = values["layer_types"] or cls.layer_types(values)
        kinds = [cls.state_kinds.get(kind, kind) for kind in kinds]
        check_layer_types(kinds, values, tuple(dict.fromkeys((FULL, SLIDING, *cls.state_kinds.values()))))
        base = base_layer(values)
        windows = {FULL: None, SLIDING: values["sliding_window"]}
        names = {kind: kind if kind in ropes else "default" if "default" in ropes else None for kind in windows}
        layers = {kind: replace(base, window=windows[kind], rope=names[kind]) for kind in windows}
        others = replace(base, rope=None, attends=False)
        return tuple(cls.layer(values, i, kind, layers.get(kind, others)) for i, kind in enumerate(kinds))


def base_layer(values: dict[str, Any]) -> LayerSpec:
    """Return a layer with the sizes and facts in `values`, without a window."""
    fields = {field.name for field in dataclasses.fields(LayerSpec)} & values.keys()
    sizes = {
        "num_heads": values["num_attention_heads"],
        "num_kv_heads": values["num_key_value_heads"],
        "v_head_dim": values["head_dim"],
    }
    return LayerSpec(**sizes | {key: values[key] for key in fields})


def pattern(num_layers: int, period: int | None, *, last_full: bool = False) -> list[str]:
    """Return the attention kinds of layers: every `period`-th has full attention, and the last if `last_full`."""
    full = [bool(period) and (i + 1) % period == 0 for i in range(num_layers)]
    if last_full:
        full[-1] = True
    return [FULL if is_full else SLIDING for is_full in full]


def shared_layer(kinds: list[str], num_shared: int, index: int) -> int | None:
    """Return the layer whose keys and values layer `index` reads: the last one of its kind that is not among the last
    `num_shared` layers; None if it has its own.
    """
    first = len(kinds) - num_shared
    if index < first:
        return None
    return max(i for i in range(first) if kinds[i] == kinds[index])


def check_layer_types(kinds: Sequence[str], values: dict[str, Any], known: Sequence[str] = (FULL, SLIDING)) -> None:
    """Raise ValueError unless `kinds` names one of `known`, sliding_attention with a window, for every layer."""
    window, num_layers = values["sliding_window"], values["num_hidden_layers"]
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window must be a positive integer or null, not {window!r}")
    unknown = set(kinds) - set(known)
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"layer_types must name {' or '.join(known)} for each of {num_layers} layers, "
            f"found {len(kinds)}: {sorted(set(kinds))}"
        )
    if SLIDING in kinds and window is None:
        raise ValueError(
            "layer_types names sliding_attention but there is no sliding_window (or use_sliding_window is false)"
        )


def complete_sizes(values: dict[str, Any]) -> None:
    """Fill in sizes that follow from other sizes, and check that they are consistent.

    Changes `values`. Raises ValueError naming the key.
    """
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for key in _SIZES:
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


def _dtype(raw: dict[str, Any]) -> str:
    dtype = (raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
    if dtype and dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def _check_state_dtype(raw: dict[str, Any]) -> None:
    for key in _STATE_DTYPES:
        if (dtype := raw.get(key)) is not None and dtype not in ("float32", "torch.float32", "auto"):
            raise ValueError(f"{key} {dtype!r} is not supported: recurrent states are kept in float32")
