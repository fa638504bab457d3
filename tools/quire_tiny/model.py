"""The Qwen3 network of quire-tiny as it is trained: float32 weights under their Hugging Face names, bfloat16 or float32
arithmetic, packed rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    vocab_size: int = 1280
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 3
    num_kv_heads: int = 3
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """x through the layers side by side, in x's dtype."""
    weights = [layer.weight.to(x.dtype) for layer in layers]
    return F.linear(x, torch.cat(weights) if len(weights) > 1 else weights[0])


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden_size, s.num_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, s.num_kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, s.num_kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.num_heads * s.head_dim, s.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(s.head_dim, s.eps), Norm(s.head_dim, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        """x [B, T, H]; cos and sin [T, 1, D / 2]; bias [B, 1, T, T], -inf where a position may not look.

        Plain matmuls: on CPU they fuse better than the flash kernel.
        """
        s, (rows, length, _) = self.s, x.shape
        q, k, v = (
            linear(x, self.q_proj, self.k_proj, self.v_proj)
            .view(rows, length, -1, s.head_dim)
            .split([s.num_heads, s.num_kv_heads, s.num_kv_heads], 2)
        )
        q, k = rotate(self.q_norm(q), cos, sin).transpose(1, 2), rotate(self.k_norm(k), cos, sin).transpose(1, 2)
        groups = s.num_heads // s.num_kv_heads
        v = v.transpose(1, 2)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(-1, -2)).float() * s.head_dim**-0.5 + bias
        out = torch.softmax(scores, -1).to(v.dtype) @ v
        return linear(out.transpose(1, 2).reshape(rows, length, -1), self.o_proj)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_proj, self.up_proj).chunk(2, -1)
        return linear(F.silu(gate) * up, self.down_proj)


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden_size, s.eps), Norm(s.hidden_size, s.eps)
        self.self_attn, self.mlp = Attention(s), MLP(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, bias)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything but the tied output projection; parameter names are those of `Qwen3Model`."""

    def __init__(self, s: Shape, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.s, self.dtype = s, dtype
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_layers))
        self.norm = Norm(s.hidden_size, s.eps)
        frequency = s.rope_theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
        angle = torch.arange(s.max_positions)[:, None, None] * frequency
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)
        self.reset()

    def reset(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
            elif name.endswith("_proj.weight"):
                nn.init.normal_(p, std=p.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        """tokens, document [B, T] -> hidden [B, T, H] in `dtype`.

        Each position sees the earlier ones of its own document.
        """
        length = tokens.shape[1]
        position = torch.arange(length)
        seen = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position)
        bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[:, None]
        x = self.embed_tokens(tokens).to(self.dtype)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length], bias)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, vocab] float32."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).float()


def hf_config(s: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.max_positions,
        "rms_norm_eps": s.eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def export(trunk: Trunk, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16) in the Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(trunk.s), indent=2) + "\n")
    generation = {"do_sample": True, "temperature": 0.2, "top_p": 0.95, "eos_token_id": [2, 0], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {f"model.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in trunk.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is written readable by its owner only
