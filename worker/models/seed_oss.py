"""Seed-OSS: Llama with biases of q, k and v."""

from __future__ import annotations

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.reader import COMMON_DEFAULTS


class SeedOss(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "seed_oss",
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
    }
