"""Model folders for measurements: the shapes of real models, a tokenizer with as many tokens as their vocabularies, and
no weights (`--load-format dummy`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B_A3B = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_3_1_8B_FP8 = LLAMA_3_1_8B | {
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
}  # fmt: skip
LLAMA_3_1_8B_AWQ = LLAMA_3_1_8B | {
    "torch_dtype": "float16",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
# the shapes of Qwen3-Next-80B-A3B, a quarter of its layers
QWEN3_NEXT = QWEN3_30B_A3B | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "partial_rotary_factor": 0.25, "rope_theta": 1e7, "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
    "num_experts_per_tok": 10, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "full_attention_interval": 4,
}  # fmt: skip
TINY = QWEN3_0_6B | {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA_3_1_8B,
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Llama-3.1-8B-FP8": LLAMA_3_1_8B_FP8,
    "Llama-3.1-8B-AWQ": LLAMA_3_1_8B_AWQ,
    "Qwen3-Next-12-layers": QWEN3_NEXT,
    "tiny": TINY,
}


def write_model(name: str, folder: Path) -> Path:
    """Write the folder of model `name` below `folder`, unless it is there, and return it."""
    config = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1} | MODELS[name]
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if not (path / "tokenizer.json").exists():
        _tokenizer(config["vocab_size"]).save(str(path / "tokenizer.json"))
    return path


def _tokenizer(size: int):
    """Return a byte-level tokenizer, which encodes any text. The ids above the bytes are words of realistic length,
    which only random ids reach.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: i for i, token in enumerate(tokens + [f"Ġw{i:x}" for i in range(len(tokens), size)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
