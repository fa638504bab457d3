"""Qwen 3: RMSNorm over every head of q and k before the rotary embedding. jina-embeddings-v5 adds adapters by task."""

from __future__ import annotations

from typing import Any

from quire.worker.models.qwen2 import Qwen2


class Qwen3(Qwen2):
    config_defaults = Qwen2.config_defaults | {"model_type": "qwen3", "head_dim": 128}
    facts = {"qk_norm": "head", "mlp_bias": False}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["attention_out_bias"] = values["attention_bias"]  # one key for all four projections


class JinaEmbeddingsV5(Qwen3):
    """The decoder of the small model; `server/startup/task_adapters.py` serves its adapters."""

    config_defaults = Qwen3.config_defaults | {"model_type": "jina_embeddings_v5", "is_decoder": True}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["is_decoder"] is False:
            raise ValueError("is_decoder: jina-embeddings-v5 over an encoder (text-nano) is not supported")
        super().complete(values, raw)
