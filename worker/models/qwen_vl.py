"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen 2 and 3 with defaults of their own."""

from __future__ import annotations

from quire.worker.models.qwen2 import Qwen2
from quire.worker.models.qwen3 import Qwen3
from quire.worker.models.qwen_moe import Qwen3Moe


class Qwen2VL(Qwen2):
    config_defaults = Qwen2.config_defaults | {
        "model_type": "qwen2_vl_text",
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
    }


_QWEN3 = {"sliding_window": None, "rope_theta": 500000.0, "max_position_embeddings": 128000}


class Qwen3VL(Qwen3):
    config_defaults = Qwen3.config_defaults | _QWEN3 | {"model_type": "qwen3_vl_text"}


class Qwen3VLMoe(Qwen3Moe):
    config_defaults = (
        Qwen3Moe.config_defaults
        | _QWEN3
        | {
            "model_type": "qwen3_vl_moe_text",
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "tie_word_embeddings": True,
        }
    )
    facts = Qwen3Moe.facts | {"norm_topk_prob": True}
