"""The attention of an encoder: to earlier and later tokens, of prompts that are whole in one step and have no cache."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import NORMS, rms_norm
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.views import chain
from quire.worker.parallel import Exchange
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import out_projection, qkv_projection, rope_view
from quire.worker.transformer.calls import LayerCall


class BidirectionalAttention(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`. A token attends to the tokens of its request that
    are less than `window` positions away, or to all.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        self.qkv_proj = qkv_projection(spec, kind, prefix, weights)
        self.o_proj = out_projection(spec, kind, prefix, weights)
        self.head_dim, self.window, self.scale, self.rotates = kind.head_dim, kind.window, kind.scale, bool(kind.rope)
        self.v_eps = spec.norm_eps if kind.v_norm else None
        self.q_norm = self.k_norm = None
        if kind.qk_norm is not None:
            assert kind.qk_norm == "head", kind.qk_norm
            self.q_norm, self.k_norm = (NORMS[spec.norm](kind.head_dim, spec.norm_eps) for _ in range(2))
            for norm in (self.q_norm, self.k_norm):
                norm.weight.view_of_tensor = chain(norm.view, rope_view(spec, kind))

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split([heads, kv_heads, kv_heads], 1)
        if self.q_norm is not None:
            q, k = (rms_norm(part, norm.weight, norm.eps) for part, norm in ((q, self.q_norm), (k, self.k_norm)))
        if self.v_eps is not None:
            v = rms_norm(v, None, self.v_eps)
        if self.rotates:
            angles = call.rotation.cos_sin[call.rotation.positions]
            q, k = apply_rotary(q, angles), apply_rotary(k, angles)
        starts, _ = call.attn[0].host_lengths()
        attended = torch.cat([self.attend(q[i:j], k[i:j], v[i:j]) for i, j in pairwise(starts)])
        return self.o_proj(call.needed(attended))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Map q `[n, heads, D]` and k and v `[n, kv_heads, D]` of a request to `[n, heads * D]`."""
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))  # [1, heads, n, D]
        attended = self.attend_near(q, k, v) if self.window and self.window < q.shape[2] else self.dot(q, k, v)
        return attended[0].transpose(0, 1).flatten(1)

    def attend_near(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend within the window. Each piece of the queries reads the keys that any of them attends to."""
        length, reach = q.shape[2], self.window - 1
        size, pieces = max(self.window, 64), []
        for start in range(0, length, size):
            stop = min(start + size, length)
            first, last = max(start - reach, 0), min(stop + reach, length)
            near = _distances(start, stop, first, last, q.device) <= reach
            pieces.append(self.dot(q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], near))
        return torch.cat(pieces, 2)

    def dot(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend where `mask` `[queries, keys]` is true."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=grouped)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_needed, self.o_proj.out_features), None)]


def _distances(start: int, stop: int, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Return how far keys first .. last - 1 are from queries start .. stop - 1, `[queries, keys]`."""
    queries = torch.arange(start, stop, device=device)
    return (queries[:, None] - torch.arange(first, last, device=device)).abs()
