"""The names that the decoder (`worker/models/decoder.py`) has for the tensors of a GGUF file. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequencies; config.json says what they were computed from
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
IGNORED = (ROPE_FACTORS, *LONG_FACTORS.values())

_MODEL = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.inputs.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.inputs.per_layer_projection_norm",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "gate.post_per_layer_input_norm",
}
# names of norms, by where a layer has them (`ModelSpec.form`)
PRE = {"ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_attention_layernorm"}
POST = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH = POST | {"ffn_norm": "pre_feedforward_layernorm"}
# whole names that are not a module's weight or bias
_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
}
EXPERT = re.compile(r"(\.experts\.)(\d+)\.")


def tensor_name(name: str, own: Mapping[str, str]) -> str:
    """The decoder's name of a GGUF tensor; `own` are names of modules of a layer that depend on the architecture.
    Tensors that it does not know keep the last parts of their name.
    """
    match = re.fullmatch(r"blk\.(\d+)\.(.+)\.(\w+)", name)
    if match is None:
        base, _, kind = name.rpartition(".")
        return f"{_MODEL[base]}.{kind}" if base in _MODEL else name
    layer, base, kind = match.groups()
    if whole := _WHOLE.get(f"{base}.{kind}"):
        return f"model.layers.{layer}.{whole}"
    return f"model.layers.{layer}.{own.get(base) or _LAYER.get(base, base)}.{kind}"


def of_all_experts(name: str) -> str:
    """The tensor of all experts that has the tensor `name` of one: ".experts.up_proj" for ".experts.3.up_proj"."""
    return EXPERT.sub(r"\1", name)


def halves_of_experts(name: str) -> tuple[str, ...]:
    """The names of the gate and up projections in a tensor that holds both of experts; else the name itself."""
    if ".experts." not in name or ".gate_up_proj." not in name:
        return (name,)
    return tuple(name.replace(".gate_up_proj.", f".{half}_proj.") for half in ("gate", "up"))


def expert_names(name: str, num_experts: int) -> Iterator[str]:
    """The names of the experts' parts of a tensor of all experts."""
    return (name.replace(".experts.", f".experts.{i}.") for i in range(num_experts))
