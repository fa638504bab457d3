"""Qwen 3: every head of q and k is normalised before it gets its position."""

from __future__ import annotations

import torch

from quire.worker.layers.norm import RMSNorm
from quire.worker.models.decoder import CausalLM, SelfAttention
from quire.worker.models.hf_config import ModelSpec


class Qwen3Attention(SelfAttention):
    def __init__(self, spec: ModelSpec, layer: int, prefix: str):
        super().__init__(spec, layer, prefix)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def head_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm.weight, self.k_norm.weight


class Qwen3(CausalLM):
    attention_cls = Qwen3Attention
