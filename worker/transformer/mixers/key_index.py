"""The index of sparse attention in a decoder layer (`layers/sparse/chosen.py`)."""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, ColumnParallelLinear, Shard, WeightFormat
from quire.worker.layers.norm import LayerNorm
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.sparse.chosen import ChoosingStep, IndexKeys, choose
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.calls import LayerCall


class KeyIndex(nn.Module):
    """Chooses the keys of each token of a layer; whole on every rank."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        sizes = self.sizes = kind.index
        self.rope_dim = kind.latent.rope_dim
        self.wq_b, self.wk, self.weights_proj = (
            ColumnParallelLinear(size, [Shard(name, rows, 0, rows)], False, weights.linear(name))
            for name, size, rows in (
                (f"{prefix}.wq_b", kind.q_lora_rank or spec.hidden_size, sizes.heads * sizes.dim),
                (f"{prefix}.wk", spec.hidden_size, sizes.dim),
                (f"{prefix}.weights_proj", spec.hidden_size, sizes.heads),
            )
        )
        self.k_norm = LayerNorm(sizes.dim, sizes.eps)
        self.attn = IndexKeys(sizes.dim, self.rope_dim, len(spec.layers) + layer)

    def write(self, x: torch.Tensor, call: LayerCall) -> None:
        """Store the keys of the tokens, whose inputs are x `[T, H]`."""
        keys = self.rotate(self.k_norm(self.wk(x))[:, None], call)[:, 0]
        self.attn.write(keys, call.attn[self.attn.cache_group])

    def choose(self, x: torch.Tensor, latents: torch.Tensor, call: LayerCall, step: ChoosingStep) -> None:
        """Choose keys for the tokens of `step`, from x `[T, H]` and the latents of queries `[T, rank]`."""
        meta = call.attn[self.attn.cache_group]
        for piece in step.pieces:
            tokens = piece.tokens.flatten()
            q = self.rotate(self.queries(x[tokens], latents[tokens], call, tokens), call, tokens)
            weights = self.weights_proj(x[tokens]).float() * (self.sizes.heads * self.sizes.dim) ** -0.5
            q, weights = (part.float().unflatten(0, piece.tokens.shape) for part in (q, weights))
            keys = self.attn.rows(meta, piece.requests, piece.longest)
            piece.keys = choose(piece, q, weights, keys, step.top)

    def queries(self, x: torch.Tensor, latents: torch.Tensor, call: LayerCall, tokens: torch.Tensor) -> torch.Tensor:
        """Return the queries `[S, heads, I]`, not rotated, of the rows `tokens` `[S]` of the step."""
        return self.wq_b(latents).unflatten(-1, (self.sizes.heads, -1))

    def rotate(self, x: torch.Tensor, call: LayerCall, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate the rotary part of x `[S, heads, I]`, of all tokens or of the rows `tokens` of the step."""
        if not self.rope_dim:
            return x
        positions = call.rotation.positions if tokens is None else call.rotation.positions[tokens]
        rows = call.rotation.cos_sin[positions]
        still = x.shape[-1] - self.rope_dim
        first, second = x.tensor_split([self.rope_dim if self.sizes.rope_first else still], -1)
        turned, kept = (first, second) if self.sizes.rope_first else (second, first)
        if self.sizes.interleaved:  # evens, then odds: the order of queries and keys does not change their products
            turned = torch.cat([turned[..., ::2], turned[..., 1::2]], -1)
        turned = apply_rotary(turned, rows)
        return torch.cat([turned, kept] if self.sizes.rope_first else [kept, turned], -1)
