"""Builds a tiny random checkpoint of every family in transformers' own layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.models.published import PUBLISHED
from tests.helpers.models.redraw import redraw

VOCAB = 128
_B = {
    "vocab_size": VOCAB,
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    "max_position_embeddings": 2048,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_H = _B | {"head_dim": 16}
_W = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [1.0, 2.0, 3.0]}
_HALF = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
_HALF_LOCAL = _HALF | {"rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DELTA = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

# keys of models without attention
_PURE = ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id")
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2}
_MAMBA |= {"mamba_chunk_size": 8, "mamba_proj_bias": True}

# of the encoder of a model with a language model
_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

# name -> (model_type in transformers, settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "afmoe",
        _H
        | _EXPERTS
        | {"num_experts": 4, "num_shared_experts": 2, "num_dense_layers": 2, "sliding_window": 24, "route_scale": 1.5}
        | {"global_attn_every_n_layers": 2, "mup_enabled": True},
    ),
    "arcee": ("arcee", _H),
    "axk1": (
        "axk1",
        _B | _EXPERTS | _LATENT | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        _B
        | _EXPERTS
        | _LATENT
        | {"head_dim": 16, "qk_rope_head_dim": 16, "num_experts": 8, "num_experts_per_token": 2}
        | {"num_expert_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "layer_group_size": 2}
        | {"num_hidden_layers": 3, "num_nextn_predict_layers": 0},
    ),
    "bamba": ("bamba", _B | _MAMBA | {"attn_layer_indices": [1, 3]}),
    "cohere": ("cohere", _B | {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("cohere2", _H | {"sliding_window": 24, "logit_scale": 0.3}),
    "cohere2_moe": (
        "cohere2_moe",
        _H | {"sliding_window": 24, "num_experts": 4, "num_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "cohere2_moe-sum": (
        "cohere2_moe",
        _H
        | {"num_experts": 4, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "sliding_window": 24}
        | {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-5},
    ),
    "cwm": ("cwm", _H | {"sliding_window": 24}),
    # many heads of the index: with few, equal scores of 0 are frequent, among which implementations choose differently
    "deepseek_v4": (
        "deepseek_v4",
        {key: value for key, value in _H.items() if key not in ("intermediate_size", "num_key_value_heads")}
        | _EXPERTS
        | {"n_routed_experts": 8, "q_lora_rank": 24, "partial_rotary_factor": 0.5, "sliding_window": 24}
        | {"o_groups": 2, "o_lora_rank": 8, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 6, "hc_mult": 3}
        | {"compress_rates": {_CSA: 4, _HCA: 16}, "layer_types": ["sliding_attention", _HCA, _CSA, _HCA]}
        | {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 2, "swiglu_limit": 0.5},
    ),
    "dots1": (
        "dots1",
        _H
        | _EXPERTS
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "sliding_window": 24}
        | {"max_window_layers": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
    ),
    "dots3_note": (
        "dots3_note_text",
        _B
        | _EXPERTS
        | _LATENT
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "shared_experts_intermediate_size": 24, "head_dim": 24}
        | {"index_topk": 20, "index_head_dim": 16, "index_n_heads": 24, "sliding_window": 24, "swa_head_dim": 32}
        | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 24}
        | {"swa_qk_nope_head_dim": 16, "swa_v_head_dim": 12}
        | {"layer_types": ["indexed_attention", "sliding_attention"] * 2},
    ),
    "ernie4_5": ("ernie4_5", _H | {"use_bias": True}),
    "exaone4": ("exaone4", _B | {"sliding_window": 24}),
    "exaone4-full": ("exaone4", _B | {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone_moe": (
        "exaone_moe",
        _H | _EXPERTS | {"num_experts": 8, "n_group": 4, "topk_group": 2, "sliding_window": 24},
    ),
    "falcon_h1": (
        "falcon_h1",
        _B
        | _MAMBA
        | {"mamba_d_ssm": 64, "mamba_rms_norm": True, "lm_head_multiplier": 0.5, "embedding_multiplier": 1.5}
        | {"mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.7, "attention_out_multiplier": 0.9}
        | {"attention_in_multiplier": 1.2, "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7], "ssm_in_multiplier": 1.4}
        | {"ssm_out_multiplier": 0.6},
    ),
    "falcon_h1-gate-first": (
        "falcon_h1",
        _B | _MAMBA | {"mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "falcon_h1-no-norm": ("falcon_h1", _B | _MAMBA | {"mamba_d_ssm": 64}),
    "falcon_mamba": (
        "falcon_mamba",
        {key: value for key, value in _B.items() if key in _PURE} | {"state_size": 8, "use_bias": True},
    ),
    "flex_olmo": ("flex_olmo", _B | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", _H),
    "gemma2": ("gemma2", _H | {"query_pre_attn_scalar": 32, "sliding_window": 24, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", _H | _W | {"query_pre_attn_scalar": 32}),
    "gemma3n": (
        "gemma3n_text",
        _H
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 24, "num_hidden_layers": 6}
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
        | {"laurel_rank": 4, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.0, 0.0, 0.5]},
    ),
    "gemma4": (
        "gemma4_text",
        _H
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 24, "num_hidden_layers": 6}
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
        | {"global_head_dim": 32, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    ),
    "gemma4-k-is-v": (
        "gemma4_text",
        _H
        | _W
        | {"hidden_size_per_layer_input": 0, "global_head_dim": 32, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1},
    ),
    "gemma4-experts": (
        "gemma4_text",
        _H
        | _W
        | {"hidden_size_per_layer_input": 0, "global_head_dim": 32, "enable_moe_block": True, "num_experts": 4}
        | {"top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        _H | _W | {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "glm": ("glm", _H),
    "glm4": ("glm4", _H),
    "gpt2": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 2048, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "granite": (
        "granite",
        _B
        | {"embedding_multiplier": 2.0, "logits_scaling": 0.5, "residual_multiplier": 0.7}
        | {"attention_multiplier": 0.4, "attention_bias": True},
    ),
    "granite4": (
        "granitemoehybrid",
        _B
        | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4, "mamba_n_heads": 8}
        | {"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["attention"] * 4}
        | {"position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "granite4-experts": (
        "granitemoehybrid",
        _B
        | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4, "mamba_n_heads": 8}
        | {"num_local_experts": 4, "shared_intermediate_size": 40, "layer_types": ["attention"] * 4},
    ),
    "granite4-mamba": (
        "granitemoehybrid",
        _B
        | _MAMBA
        | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
        | {"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"] * 2},
    ),
    "granite4-mamba-experts": (
        "granitemoehybrid",
        _B
        | _MAMBA
        | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
        | {"num_local_experts": 4, "shared_intermediate_size": 40, "layer_types": ["mamba", "attention"] * 2},
    ),
    "granite_moe_shared": (
        "granitemoeshared",
        _B | {"attention_multiplier": 0.4, "num_local_experts": 4, "shared_intermediate_size": 40},
    ),
    "granite_moe_swa": (
        "granitemoe_swa",
        _B
        | _W
        | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
        | {"num_local_experts": 4, "shared_intermediate_size": 40, "layer_rope_theta": [1e4, 0, 1e5, 1e4]},
    ),
    "granite_swa": (
        "granite_swa",
        _B
        | _W
        | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
        | {"layer_rope_theta": [1e4, 0, 1e5, 1e4]},
    ),
    "hy_v3": ("hy_v3", _H | _EXPERTS | {"num_experts": 4, "router_scaling_factor": 1.5, "attention_bias": True}),
    "hunyuan": (
        "hunyuan_v1_dense",
        _H | {"rope_parameters": {"rope_type": "dynamic", "alpha": 10.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "hy_v4": (
        "hy_v4",
        _B
        | _EXPERTS
        | _LATENT
        | {"n_routed_experts": 8, "num_hidden_layers": 3, "hc_mult": 3, "swiglu_limit": 0.5, "index_topk": 20}
        | {"index_head_dim": 16, "index_n_heads": 24, "indexer_types": ["full", "full", "shared"]},
    ),
    "hyperclovax": (
        "hyperclovax",
        _H
        | {"embedding_multiplier": 2.0, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.4},
    ),
    "inkling2": (
        "inkling2_text",
        {key: value for key, value in _H.items() if key != "intermediate_size"}
        | _EXPERTS
        | {"n_routed_experts": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "swa_head_dim": 32, "d_rel": 4}
        | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "sliding_window_size": 24, "rel_extent": 40}
        | {"log_scaling_n_floor": 16, "n_layers_per_attn_res_block": 2, "unpadded_vocab_size": VOCAB}
        | {"qk_l2_clip_threshold": 4.0, "rel_l2_clip_threshold": 2.0, "mlp_gate_softcap": 1.0, "mlp_up_softcap": 2.0}
        | {"final_logit_softcapping": 5.0},
    ),
    "internlm3": ("internlm3", _H | {"qkv_bias": True, "bias": True}),
    "jais2": ("jais2", _H),
    "jamba": (
        "jamba",
        _B
        | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"mamba_d_state": 8, "mamba_proj_bias": True},
    ),
    "kimi_k2": ("deepseek_v3", _B | _EXPERTS | _LATENT | {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}),
    "kimi_linear": (
        "kimi_linear",
        _B
        | _EXPERTS
        | _LATENT
        | {"q_lora_rank": None, "num_experts": 4, "num_experts_per_token": 2, "num_hidden_layers": 3}
        | {"linear_head_dim": 16, "linear_num_heads": 4}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "kolibri1": (
        "kolibri1",
        {key: value for key, value in _H.items() if key != "intermediate_size"}
        | _EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 24, "sliding_window": 24, "num_hidden_layers": 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "laguna": (
        "laguna",
        _H
        | _W
        | _EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 24, "moe_routed_scaling_factor": 1.5}
        | {"num_attention_heads_per_layer": [4, 6, 6, 4]},
    ),
    "laguna-entries": (
        "laguna",
        _H | _W | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24, "gating": "per-element"},
    ),
    "llama4": (
        "llama4_text",
        _H
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 40, "attention_chunk_size": 32}
        | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "floor_scale": 40, "attn_scale": 0.4},
    ),
    "lfm2": (
        "lfm2",
        _B | {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False, "conv_bias": True},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        _B | _EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, "num_experts": 4},
    ),
    "lfm3": (
        "lfm3",
        _H
        | {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "sliding_window": 24}
        | {"conv_bias": True},
    ),
    "mamba": (
        "mamba",
        {key: value for key, value in _B.items() if key in _PURE} | {"state_size": 8, "use_bias": True},
    ),
    "mamba2": (
        "mamba2",
        {key: value for key, value in _B.items() if key in _PURE}
        | {"state_size": 16, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8, "use_bias": True}
        | {"time_step_limit": (0.01, 0.5)},
    ),
    "mellum": ("mellum", _H | _W | _EXPERTS | {"num_experts": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 3}),
    "mimo_v2": (
        "mimo_v2_flash",
        _H
        | _W
        | _EXPERTS
        | {"num_key_value_heads": 1, "v_head_dim": 12, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"norm_topk_prob": True, "rope_parameters": {"full_attention": _HALF, "sliding_attention": _HALF_LOCAL}},
    ),
    "minimax": (
        "minimax",
        _B
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8, "linear_attn_alpha_factor": 1.5}
        | {"full_attn_alpha_factor": 1.3, "mlp_alpha_factor": 0.8, "mlp_beta_factor": 1.2}
        | {"linear_attn_beta_factor": 0.9, "full_attn_beta_factor": 1.1},
    ),
    "ministral": ("ministral", _H | _W),
    "ministral3": ("ministral3", _H | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}}),
    "mistral4": (
        "mistral4",
        _B
        | _EXPERTS
        | _LATENT
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.1}},
    ),
    "nemotron": ("nemotron", _B | {"mlp_bias": True, "attention_bias": True}),
    "nemotron_h": (
        "nemotron_h",
        {key: value for key, value in _H.items() if key != "num_hidden_layers"}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]}
        | {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8}
        | {"use_bias": True},
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {key: value for key, value in _H.items() if key != "num_hidden_layers"}
        | _EXPERTS
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "ssm_state_size": 16}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 8}
        | {"n_group": 4, "topk_group": 2, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 1.5}
        | {"moe_latent_size": 20},
    ),
    "olmo2": ("olmo2", _B),
    "olmo3": ("olmo3", _B | {"sliding_window": 24}),
    "olmo_hybrid": (
        "olmo_hybrid",
        _B
        | {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 16},
    ),
    "opt": (
        "opt",
        {key: value for key, value in _B.items() if key != "intermediate_size"}
        | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "phi3": (
        "phi3",
        _B | {"rope_parameters": _LONG | {"partial_rotary_factor": 0.75}, "original_max_position_embeddings": 2048},
    ),
    "phi3-long": (
        "phi3",
        _B
        | {"rope_parameters": _LONG | {"partial_rotary_factor": 0.75, "attention_factor": 1.1}}
        | {"original_max_position_embeddings": 1},
    ),
    "qwen3_5": ("qwen3_5_text", _H | _DELTA | {"intermediate_size": 56}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        _H | _DELTA | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_next": (
        "qwen3_next",
        _H | _DELTA | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        {key: value for key, value in _H.items() if key != "intermediate_size"}
        | _DELTA
        | _EXPERTS
        | {"num_experts": 4, "shared_expert_intermediate_size": 24, "hc_count": 3, "hc_lowrank": 8}
        | {"layer_types": ["linear_attention", "indexed_attention"] * 2, "output_gate_type": "sigmoid"}
        | {"ple_layer_ids": [1, 3], "ple_embed_dim": 16, "heads_per_ngram": 4, "ngram_vocab_size_base": 50}
        | {"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 3, "indexer_n_heads": 24}
        | {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 20, "indexer_compress_ratio": 4}
        | {"rope_parameters": _HALF},
    ),
    "seed_oss": ("seed_oss", _H),
    "solar_open": ("solar_open", _H | _EXPERTS | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}),
    "smollm3": ("smollm3", _B),
    "starcoder2": ("starcoder2", _B | {"sliding_window": 24}),
    "vaultgemma": ("vaultgemma", _H | {"query_pre_attn_scalar": 32, "sliding_window": 24}),
    "youtu": ("youtu", _B | _LATENT | {"pad_token_id": None}),  # transformers sets the embedding of padding to 0
    "zamba2": (
        "zamba2",
        _B
        | {"num_key_value_heads": 4, "num_hidden_layers": 4, "mamba_d_state": 16, "mamba_ngroups": 2}
        | {"layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"], "n_mamba_heads": 4}
        | {"chunk_size": 8, "num_mem_blocks": 2, "adapter_rank": 4, "use_shared_attention_adapter": True}
        | {"use_mem_rope": True},
    ),
    "zaya": (
        "zaya",
        {key: value for key, value in _H.items() if key != "intermediate_size"}
        | {"num_experts": 4, "moe_intermediate_size": 16, "router_hidden_size": 12, "sliding_window": 24}
        | {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "cca_time1": 3},
    ),
}

_GLM_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "image_size": 28}
_GLM_VISION |= {"patch_size": 14, "out_hidden_size": 32}
# the same for language models that transformers has only with an encoder
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4v": (
        "glm46v",
        {
            "text_config": _B
            | {"model_type": "glm4v_text", "rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 2, 1]}},
            "vision_config": _GLM_VISION,
        },
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {
            "text_config": _H
            | _EXPERTS
            | {"model_type": "glm4v_moe_text", "n_routed_experts": 4, "num_hidden_layers": 2}
            | {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}},
            "vision_config": _GLM_VISION,
        },
    ),
    "glm5_next": (
        "glm5_next",
        {
            "text_config": _B
            | _EXPERTS
            | _LATENT
            | {"model_type": "glm5_next_text", "qk_rope_head_dim": 0, "n_routed_experts": 8, "num_hidden_layers": 3}
            | {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "hc_mult": 3}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 1, "topk_group": 1, "index_topk": 20}
            | {"index_head_dim": 16, "index_n_heads": 24, "index_kpool": 4, "linear_head_dim": 16}
            | {"linear_num_heads": 4, "swiglu_limit": 0.5},
            "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "image_size": 28}
            | {"patch_size": 14, "out_hidden_size": 32, "projection_intermediate_size": 16},
        },
    ),
    "inkling": (
        "inkling_mm_model",
        {
            "text_config": _H
            | _EXPERTS
            | {"model_type": "inkling_text", "n_routed_experts": 4, "local_layer_ids": [0, 2], "swa_head_dim": 32}
            | {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "sliding_window_size": 24, "d_rel": 4}
            | {"rel_extent": 40, "log_scaling_n_floor": 16, "dense_mlp_idx": 1, "logits_mup_width_multiplier": 2.0},
            **{"vision_config": {"patch_size": 4}, "audio_config": {"n_mel_bins": 2}},
        },
    ),
    "minimax_m3": (
        "minimax_m3_vl",
        {
            "text_config": _H
            | {"model_type": "minimax_m3_vl_text", "intermediate_size": 16, "dense_intermediate_size": 48}
            | {"shared_intermediate_size": 24, "num_hidden_layers": 3, "rotary_dim": 8, "num_local_experts": 4}
            | {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]}
            | {"layer_types": ["full_attention"] + 2 * ["minimax_m3_sparse"], "index_n_heads": 2}
            | {"index_block_size": 4, "index_topk_blocks": 5}
            | {"index_head_dim": 16, "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}},
            "vision_config": _TOWER | {"image_size": 28, "patch_size": 14},
        },
    ),
    "mistral_large4": (
        "mistral_large4",
        {
            "text_config": _B
            | _EXPERTS
            | _LATENT
            | {"model_type": "mistral_large4_text", "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
            | {"no_rope_layers": [1, 0, 1, 1], "kv_source_layers": [0, 1, 2, 2], "index_topk": 20}
            | {"indexer_types": ["full", "full", "shared", "full"], "index_head_dim": 16, "index_n_heads": 24}
            | {"routed_scaling_factor": 1.5, "rope_parameters": _YARN | {"mscale_all_dim": 0.8}},
            "vision_config": _TOWER | {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
        },
    ),
    "muse_glimmer": (
        "muse_glimmer",
        {
            "text_config": _H | {"model_type": "muse_glimmer_text", "sliding_window": 24},
            "vision_config": _TOWER | {"pos_emb_height": 4, "pos_emb_width": 4},
            "out_hidden_size": 16,
            "projector_hidden_size": 16,
        },
    ),
    "nemotron_h_omni": (
        "nemotron_h_omni",
        {
            "text_config": {"model_type": "nemotron_h"} | FAMILIES["nemotron_h"][1],
            "vision_config": _TOWER | {"image_size": 32, "patch_size": 16, "video_temporal_patch_size": 2},
            "projector_hidden_size": 16,
            "vision_hidden_size": 16,
        },
    ),
    "step3p5": (
        "step3p7",
        {
            "text_config": _H
            | _W
            | _EXPERTS
            | {"n_routed_experts": 4, "share_expert_dim": 24, "moe_layers_enum": "1,2,3"}
            | {"moe_router_scaling_factor": 1.5, "attention_other_setting": {"num_attention_heads": 6}}
            | {"swiglu_limits": [0, 0, 0.5, 0], "swiglu_limits_shared": [0, 0, 0, 0.3]}
            | {"rope_theta": [1e4, 1e5] * 2, "partial_rotary_factors": [1.0, 0.5] * 2},
            "vision_config": {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14},
        },
    ),
}

# models without a file of their own, which transformers computes
BY_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "zamba": (  # all its hybrid layers share one module of attention
        "zamba",
        _H
        | {"num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16, "num_hidden_layers": 4}
        | {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_dt_rank": 4, "mamba_d_state": 8},
    ),
}

# compared in float32 only: these differ from their family in one formula, and rounding to 16 bits moves what a random
# Zamba 2 says by nats, in transformers, too, and what the index of DeepSeek V4 chooses
VARIANTS = ("deepseek_v4", "falcon_h1-gate-first", "falcon_h1-no-norm", "zamba2")
WITHOUT_VARIANTS = [name for name in FAMILIES if name not in VARIANTS]


def family_config(name: str) -> Any:
    """Return transformers' configuration of family `name`, as in its config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, settings = (FAMILIES | SEEING | BY_TRANSFORMERS)[name]
    config = CONFIG_MAPPING[model_type](**settings)
    config.architectures = [causal_lm_class(model_type).__name__]
    return config


def build_family(name: str, folder: str | Path, dtype: str = "float32", **overrides: Any) -> str:
    """Write the checkpoint of family `name`, with settings changed by `overrides`, into `folder` and return that."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, settings = (FAMILIES | SEEING | BY_TRANSFORMERS)[name]
    torch.manual_seed(0)
    model = causal_lm_class(model_type)._from_config(CONFIG_MAPPING[model_type](**settings | overrides))
    redraw(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if name in PUBLISHED:
        PUBLISHED[name](Path(folder, "model.safetensors"))
    return str(folder)


def causal_lm_class(model_type: str) -> Any:
    """The class of transformers' language models of a type, whose prompts may have images if there is no other."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    seeing = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = seeing | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return getattr(transformers, names.get(model_type) or "Mistral4ForCausalLM")  # a type that is not listed there


def text_types() -> set[str]:
    """Return the `model_type` of each family's language model."""
    return {settings.get("text_config", {}).get("model_type", kind) for kind, settings in (FAMILIES | SEEING).values()}
