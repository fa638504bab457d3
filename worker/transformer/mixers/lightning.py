"""Lightning attention (https://arxiv.org/abs/2401.04658) of MiniMax-Text-01."""

from __future__ import annotations

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, RowParallelLinear, Shard, WeightFormat
from quire.worker.layers.rowwise import rsqrt, sigmoid, silu
from quire.worker.parallel import Exchange, tp
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.config import ModelSpec
from quire.worker.transformer.mixers.base import StateMixer, float_parameter, shards, split
from quire.worker.transformer.mixers.delta import Ungrouped

_EPS = 1e-6  # of its norm, whatever config.json says about the others


class Lightning(StateMixer):
    """Linear attention with a constant decay per head; its normed result is gated."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        kind, group = spec.layers[layer].state, tp()
        super().__init__(spec.hidden_size, layer, kind.shapes(group.size))
        self.group, self.eps, self.dim = group, _EPS, kind.head_dim
        width = kind.num_heads * kind.head_dim
        self.width, self.full, self.heads = width // group.size, width, kind.num_heads // group.size
        mine = 3 * self.width
        shard = Shard(f"{prefix}.qkv_proj", 3 * width, group.rank * mine, mine, view=Ungrouped((kind.head_dim,) * 3))
        self.qkv_proj = ColumnParallelLinear(spec.hidden_size, [shard], False, weights.linear(f"{prefix}.qkv_proj"))
        rows = split([width], group.rank, group.size)
        self.output_gate = ColumnParallelLinear(
            spec.hidden_size,
            shards(f"{prefix}.output_gate", width, rows),
            False,
            weights.linear(f"{prefix}.output_gate"),
        )
        self.norm = float_parameter(f"{prefix}.norm.weight", (width,), *rows[0], mean=1.0)
        self.out_proj = RowParallelLinear(
            width,
            spec.hidden_size,
            False,
            f"{prefix}.out_proj",
            "num_attention_heads * head_dim",
            weights.linear(f"{prefix}.out_proj"),
        )
        heads = torch.arange(group.rank * self.heads, (group.rank + 1) * self.heads, dtype=torch.float32)
        slopes = torch.exp2(-8.0 * (heads + 1) / kind.num_heads) * kind.decay_scale
        self.register_buffer("decay", -slopes, persistent=False)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        step = self.state.step(call.attn)
        q, k, v = silu(self.qkv_proj(x).float()).unflatten(-1, (3, self.heads, self.dim)).unbind(1)
        decay = self.decay.expand(len(x), -1)
        y = self.ops.linear_attention(q, k, v, decay, self.state.pages[0], step).flatten(1)
        x, y = call.needed(x), call.needed(y)
        squares = self.group.all_reduce(y.square().sum(-1, keepdim=True))
        y = y * rsqrt(squares / self.full + self.eps) * self.norm
        return self.out_proj((sigmoid(self.output_gate(x).float()) * y).to(x.dtype))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return [((num_needed, 1), torch.float32), *super().exchanges(num_tokens, num_needed)]
