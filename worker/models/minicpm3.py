"""MiniCPM 3: latent attention, and scales of the embedding, the residual stream and the logits."""

from __future__ import annotations

from typing import Any

from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.mla import MLA_DEFAULTS, MLAFamily
from quire.worker.transformer.reader import COMMON_DEFAULTS


class MiniCPM3(MLAFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MLA_DEFAULTS
        | {
            "model_type": "minicpm3",
            "vocab_size": 73448,
            "hidden_size": 2560,
            "intermediate_size": 6400,
            "num_hidden_layers": 62,
            "num_attention_heads": 40,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        }
    )

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values.update(
            embed_scale=float(values["scale_emb"]),
            residual_scale=values["scale_depth"] / values["num_hidden_layers"] ** 0.5,
            logit_scale=values["dim_model_base"] / values["hidden_size"],
        )
