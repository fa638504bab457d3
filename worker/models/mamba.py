"""Mamba, Falcon-Mamba and Mamba 2: only mixers with a state, each after a norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from quire.worker.spec.model import LayerSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mamba_reader import mamba1, pure_mamba2
from quire.worker.transformer.reader import COMMON_DEFAULTS, STATE

_UNLIMITED = 1 << 20  # tokens: a state has no longest context


class Mamba(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "mamba",
        "vocab_size": 50280,
        "hidden_size": 768,
        "intermediate_size": None,
        "state_size": 16,
        "num_attention_heads": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": _UNLIMITED,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": "auto",
        "tie_word_embeddings": True,
    }
    facts = {"form": "single", "head_dim": 16}
    state_kinds = {STATE: STATE}
    renames = {
        "model.embed_tokens": "backbone.embeddings",
        "model.norm": "backbone.norm_f",
        "model": "backbone",
        "input_layernorm": "norm",
        "mamba": "mixer",
    }
    mixer: ClassVar[str] = "mamba1"

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["intermediate_size"] = values["intermediate_size"] or int(values["expand"] * values["hidden_size"])

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [STATE] * values["num_hidden_layers"]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixer=cls.mixer, mlp="none", state=cls.state(values))

    @classmethod
    def state(cls, values: dict[str, Any]) -> Any:
        """Return the mixer of all layers."""
        return mamba1(values, values["intermediate_size"])


class FalconMamba(Mamba):
    config_defaults = Mamba.config_defaults | {"model_type": "falcon_mamba", "mixer_rms_eps": 1e-6}

    @classmethod
    def state(cls, values: dict[str, Any]) -> Any:
        return mamba1(values, values["intermediate_size"], norms="plain", eps=values["mixer_rms_eps"])


class Mamba2(Mamba):
    config_defaults = Mamba.config_defaults | {
        "model_type": "mamba2",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "time_step_limit": (0.0, float("inf")),
        "tie_word_embeddings": False,
    }
    facts = {"form": "single"}
    mixer = "mamba2"

    @classmethod
    def state(cls, values: dict[str, Any]) -> Any:
        return pure_mamba2(values, values["num_heads"], values["head_dim"], values["state_size"])
