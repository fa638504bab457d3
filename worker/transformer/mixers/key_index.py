"""The index of sparse attention in a decoder layer (`layers/sparse/chosen.py`)."""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Part,
    Shard,
    WeightFormat,
    empty_parameter,
)
from quire.worker.layers.norm import LayerNorm
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.sparse.chosen import ChoosingStep, IndexKeys, Piece, choose
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
        half = sizes.width // 2
        part = self.rope_dim if sizes.pool == 1 and 0 < self.rope_dim < sizes.dim else half
        self.attn = IndexKeys(sizes.width, part, len(spec.layers) + layer)

    def write(self, x: torch.Tensor, call: LayerCall) -> None:
        """Store the keys of the tokens, whose inputs are x `[T, H]`."""
        self.attn.write(self.entries(x, call), call.attn[self.attn.cache_group])

    def entries(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return what the cache holds of the tokens, `[T, width]`."""
        return self.rotate(self.k_norm(self.wk(x))[:, None], call)[:, 0]

    def choose(self, x: torch.Tensor, latents: torch.Tensor, call: LayerCall, step: ChoosingStep) -> None:
        """Choose keys for the tokens of `step`, from x `[T, H]` and the latents of queries `[T, rank]`."""
        meta = call.attn[self.attn.cache_group]
        for piece in step.pieces:
            tokens = piece.tokens.flatten()
            q = self.rotate(self.queries(x[tokens], latents[tokens], call, tokens), call, tokens)
            weights = self.weights_proj(x[tokens]).float() * (self.sizes.heads * self.sizes.dim) ** -0.5
            q, weights = (part.float().unflatten(0, piece.tokens.shape) for part in (q, weights))
            keys = self.attn.rows(meta, piece.requests, piece.longest)
            piece.keys = self.best(piece, q, weights, keys)

    def best(self, piece: Piece, q: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the positions of the keys with the highest scores, see `choose`; rows `[B, longest, width]` are those
        of the cache.
        """
        return choose(piece, q, weights, rows, self.sizes.top)

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


class PooledIndex(KeyIndex):
    """Chooses groups of consecutive tokens by a weighted mean of their keys (GLM-5.3), and the tokens after the last
    whole group. The weights of a channel are the softmax over the group of a product of the input and a bias.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        name, rows = f"{prefix}.index_kpool_compress_gate", self.sizes.dim
        self.gate = ColumnParallelLinear(spec.hidden_size, [Shard(name, rows, 0, rows)], False, weights.linear(name))
        shape = self.sizes.pool, self.sizes.dim
        self.bias = empty_parameter(*shape, parts=[Part(f"{prefix}.index_kpool_compress_ape", shape)])

    def entries(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return torch.cat([super().entries(x, call), self.gate(x)], -1)

    def best(self, piece: Piece, q: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        pool, top = self.sizes.pool, self.sizes.top
        whole = rows[:, : rows.shape[1] // pool * pool].unflatten(1, (-1, pool))  # [B, groups, pool, 2 I]
        keys, gates = whole.split(self.sizes.dim, -1)
        means = ((gates + self.bias.float()).softmax(2) * keys).sum(2)
        within = torch.arange(pool, device=rows.device)
        chosen = (choose(piece, q, weights, means, top // pool, pool)[..., None] * pool + within).flatten(-2)
        count = (piece.positions[..., None] + 1) % pool
        rest = (piece.positions[..., None] + 1 - count + within[:-1]).masked_fill(within[:-1] >= count, -1)
        return torch.cat([chosen, rest], -1)
