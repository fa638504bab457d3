"""The names that the decoder (`worker/transformer/decoder.py`) has for the tensors of a GGUF file. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

ROPE_FACTORS = (
    "rope_freqs.weight"  # divisors of the frequencies; config.json has the settings that they were computed from
)
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
IGNORED = (ROPE_FACTORS, *LONG_FACTORS.values())
DENSE = ("dense_2", "dense_3")  # layers after pooling

_MODEL = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.inputs.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.inputs.per_layer_projection_norm",
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
    "token_types": "model.embed_types",
    "token_embd_norm": "model.embed_norm",
    "cls": "score.dense",
    "cls.norm": "score.norm",
    "cls.output": "score.out_proj",
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
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer_compressor_gate": "self_attn.indexer.index_kpool_compress_gate",
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
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
# for a layer that drafts tokens, by the decoder's names of its parts (`worker/transformer/mtp.py`)
_DRAFTING = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "layer_output_norm": "norm",  # MiMo V2
}
# names of norms, by where a layer has them (`ModelSpec.form`)
PRE = {"ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_attention_layernorm"}
POST = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH = POST | {"ffn_norm": "pre_feedforward_layernorm"}
AFTER = {"attn_output_norm": "post_attention_layernorm", "layer_output_norm": "post_feedforward_layernorm"}
# for Gemma 4's layers with experts next to the MLP
MIXED = SANDWICH | {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
# whole names that are not a module's weight or bias
_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
}
_STACKS = (".experts.", ".altup_projections.", ".altup_unembed_projections.")  # modules in one tensor
_OF_STACK = re.compile(rf"({'|'.join(map(re.escape, _STACKS))})(\d+)\.")


def tensor_name(name: str, own: Mapping[str, str], num_layers: int | None = None) -> str:
    """Return the decoder's name of a GGUF tensor; `own` are names of a layer's modules, or of whole tensors, that
    depend on the architecture. Layers from `num_layers` on draft tokens. Unknown tensors keep the last parts of their
    name.
    """
    if name.endswith(".exp_probs_b"):  # for Hunyuan 3, written without an end
        name += ".bias"
    if re.fullmatch(r"blk\.\d+\.\w+", name):  # ssm_a and ssm_d, norms of Falcon-H1 and PLaMo
        name += ".weight"
    match = re.fullmatch(r"blk\.(\d+)\.(.+)\.(\w+)", name)
    if match is None:
        if whole := own.get(name):
            return whole
        base, _, kind = name.rpartition(".")
        return f"{own.get(base) or _MODEL[base]}.{kind}" if base in _MODEL else name
    layer, base, kind = match.groups()
    drafts = num_layers is not None and int(layer) >= num_layers
    if drafts and base in _DRAFTING:
        return f"mtp.{int(layer) - num_layers}.{_DRAFTING[base]}.{kind}"
    prefix = f"mtp.{int(layer) - num_layers}.layer" if drafts else f"model.layers.{layer}"
    if whole := own.get(f"{base}.{kind}") or _WHOLE.get(f"{base}.{kind}"):
        return f"{prefix}.{whole}"
    return f"{prefix}.{own.get(base) or _LAYER.get(base, base)}.{kind}"


def is_stack(name: str) -> bool:
    """Return whether a tensor holds several modules: all experts, or all streams of Gemma 3n."""
    return any(stack in name for stack in _STACKS)


def stack_of_tensor(name: str) -> str:
    """Return the tensor that holds the tensor `name` of one module: ".experts.up_proj" for ".experts.3.up_proj"."""
    return _OF_STACK.sub(r"\1", name)


def stack_names(name: str, count: int) -> Iterator[str]:
    """Return the names of the modules' parts of such a tensor."""
    stack = next(stack for stack in _STACKS if stack in name)
    return (name.replace(stack, f"{stack}{i}.") for i in range(count))


def row_names(name: str, fused_qkv: bool) -> tuple[str, ...]:
    """Return the names of the weights whose rows a tensor concatenates, else its own name. With `fused_qkv` the
    decoder, too, has one weight for q, k and v.
    """
    if ".experts." in name and ".gate_up_proj." in name:
        return tuple(name.replace(".gate_up_proj.", f".{half}_proj.") for half in ("gate", "up"))
    if not fused_qkv and ".qkv_proj." in name:
        return tuple(name.replace(".qkv_proj.", f".{part}_proj.") for part in "qkv")
    return (name,)
