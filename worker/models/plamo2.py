"""PLaMo 2 (https://arxiv.org/abs/2509.04897): a state in most layers, windows in the others, and norms before and after
the mixer and the MLP, which store w minus a constant of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.checkpoints.gguf.states import plamo2_attends
from quire.worker.layers.linear import WeightFormat
from quire.worker.models.plamo3 import PlamoDecoder
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.state import PlamoMambaSpec
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING, STATE


class Plamo2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "plamo2",
        "vocab_size": 32000,
        "intermediate_size": 13312,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "attention_window_size": 2048,
        "full_attention_idx": None,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_num_heads": 64,
        "mamba_step": 2,
        "mamba_enabled": True,
        "tie_word_embeddings": True,
    }
    aliases = CausalLM.aliases | {"hidden_size_per_head": "head_dim"}
    facts = {
        "form": "sandwich",
        "norm": "rms_offset",
        "qk_norm": "own",
        "fused": ("qkv_proj", "gate_up_proj"),
        "attention_bias": False,
        "mlp_bias": False,
    }
    state_kinds = {STATE: STATE}
    renames = {
        "model.layers": "model.layers.layers",
        "self_attn": "mixer",
        "self_attn.q_norm.weight": "mixer.q_weight",
        "self_attn.k_norm.weight": "mixer.k_weight",
        "input_layernorm": "pre_mixer_norm",
        "post_attention_layernorm": "post_mixer_norm",
        "pre_feedforward_layernorm": "pre_mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    }

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if not values["mamba_enabled"]:
            raise ValueError("mamba_enabled false is not supported for PLaMo 2")
        # the published code keeps so many earlier tokens, and the token itself
        values["sliding_window"] = values["attention_window_size"] + 1

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        count, step, full = values["num_hidden_layers"], values["mamba_step"], values["full_attention_idx"] or ()
        if not isinstance(step, int) or step < 2:
            raise ValueError(f"mamba_step must be an integer of at least 2, not {step!r}")
        attends = plamo2_attends(count, step)
        return [STATE if not attends[i] else FULL if i in full else SLIDING for i in range(count)]

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        if kind != STATE:
            return layer
        state = PlamoMambaSpec(
            values["mamba_num_heads"],
            values["head_dim"],
            values["mamba_d_state"],
            max(64, values["hidden_size"] // 16),
            values["mamba_d_conv"],
            values["rms_norm_eps"],
        )
        return replace(layer, mixer="plamo_mamba", state=state)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return PlamoDecoder(spec, max_model_len, weights)
