"""Qwen 3: every head of q and k is normalised before it gets its position."""

from __future__ import annotations

import torch

from configs.hf_config import ModelSpec
from worker.layers.norm import RMSNorm
from worker.models.decoder import CausalLM, SelfAttention


class Qwen3Attention(SelfAttention):
    def __init__(self, spec: ModelSpec, layer: int, prefix: str):
        super().__init__(spec, layer, prefix)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def place(self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().place(self.q_norm(q), self.k_norm(k), cos_sin)


class Qwen3(CausalLM):
    attention_cls = Qwen3Attention
