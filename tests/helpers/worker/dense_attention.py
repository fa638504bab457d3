"""Implements a simple attention backend as the reference of tests: it gathers each request's keys and attends densely
under a causal mask.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.worker.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from quire.worker.attention.scaled import ScaledCache
from quire.worker.layers.attention import Attention
from quire.worker.layers.mla import LatentAttention
from quire.worker.layers.state import RecurrentState, StateSteps

BLOCK_SIZE = 16


class DenseAttention(AttentionBackend):
    name = "dense"

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        return None

    def build(self, meta: AttentionMetadata) -> None:
        pass

    def attend(self, call):
        q, k_cache, v_cache, meta = call.q, call.k_cache, call.v_cache, call.meta
        scale, sliding_window, soft_cap, sinks = call.scale, call.sliding_window, call.soft_cap, call.sinks
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
        groups = q.shape[1] // k_cache.shape[2]
        for i, (start, end) in enumerate(zip(meta.query_start_loc.tolist(), meta.query_start_loc[1:].tolist())):
            length = int(meta.seq_lens[i])
            k, v = (
                cache[meta.block_table[i].long()].flatten(0, 1)[:length].repeat_interleave(groups, 1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k.float()) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position = torch.arange(length - (end - start), length)[:, None]
            key = torch.arange(length)[None]
            own = call.bias and call.bias.of(slice(start, end))
            if own:
                scores = scores + own.at(position - key).transpose(0, 1)
            visible = (key <= position) & (key > position - (sliding_window or length + 1))
            scores = scores.masked_fill(~visible, -torch.inf)
            if own and own.sinks is not None:
                scores = torch.cat((scores, own.sinks.float().t()[..., None]), -1)
            if sinks is not None:
                scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, end - start, 1)), -1)
            out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v.float())
        return out


class PagedRunner:
    """Runs a model over a paged cache, chunk by chunk, with scattered blocks: `step({request: tokens})` -> hidden
    states per request, or the last `wanted` of each. Layers take turns in the cache groups.
    """

    def __init__(
        self,
        model,
        num_requests: int,
        max_len: int,
        backend: AttentionBackend | None = None,
        num_groups: int = 1,
        kv_dtype: torch.dtype | None = None,
    ):
        self.model, self.backend, self.lengths = model, backend or DenseAttention(), [0] * num_requests
        blocks = -(-max_len // BLOCK_SIZE)
        # block 0 is the null block
        generator = torch.Generator().manual_seed(1)
        orders = [torch.randperm(num_requests * blocks, generator=generator) + 1 for _ in range(num_groups)]
        self.block_tables = [order.view(num_requests, blocks) for order in orders]
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer.cache_group = layer.layer_index % num_groups
                shape = (num_requests * blocks + 1, layer.num_kv_heads, BLOCK_SIZE)
                layer.k_cache, layer.v_cache = (
                    torch.zeros(*shape, dim, dtype=model.dtype).transpose(1, 2)
                    for dim in (layer.head_dim, layer.v_head_dim)
                )
                if kv_dtype is not None:  # of 8 bits
                    layer.k_cache, layer.v_cache = (
                        ScaledCache(cache.to(kv_dtype), torch.zeros(shape).transpose(1, 2))
                        for cache in (layer.k_cache, layer.v_cache)
                    )
                if isinstance(layer, LatentAttention):
                    layer.v_cache = layer.k_cache[..., : layer.v_head_dim]
        self.state_layers = [module for module in model.modules() if isinstance(module, RecurrentState)]
        for state in self.state_layers:  # the last group; request i has page i + 1
            state.cache_group = num_groups
            state.pages = [torch.zeros(num_requests + 1, *shape) for shape in state.shapes]
        layers = {layer.layer_index: layer for layer in model.modules() if isinstance(layer, Attention)}
        for layer in layers.values():
            if layer.kv_from is not None:
                source = layers[layer.kv_from]
                layer.cache_group, layer.k_cache, layer.v_cache = source.cache_group, source.k_cache, source.v_cache

    @torch.inference_mode()
    def step(self, tokens: dict[int, list[int]], wanted: dict[int, int] | None = None) -> dict[int, torch.Tensor]:
        rows, ids, positions, slots, starts = list(tokens), [], [], [[] for _ in self.block_tables], [0]
        for row, new in tokens.items():
            at = torch.arange(self.lengths[row], self.lengths[row] + len(new))
            ids += new
            positions.append(at)
            for table, group in zip(self.block_tables, slots):
                group.append(table[row][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
            starts.append(len(ids))
            self.lengths[row] += len(new)
        lengths = torch.tensor([self.lengths[row] for row in rows], dtype=torch.int32)
        metas = tuple(
            AttentionMetadata(
                self.backend,
                torch.cat(group),
                torch.tensor(starts, dtype=torch.int32),
                lengths,
                table[rows].int(),
                max(len(new) for new in tokens.values()),
                int(lengths.max()),
            )
            for table, group in zip(self.block_tables, slots)
        )
        if self.state_layers:
            pages = torch.tensor([[row + 1] * 2 for row in rows], dtype=torch.int32)
            metas = (*metas, replace(metas[0], backend=StateSteps(), block_table=pages))
        for meta in metas:
            meta.backend.build(meta)
        if wanted is None:
            hidden = self.model(torch.tensor(ids), torch.cat(positions), metas)
            return {row: hidden[starts[i] : starts[i + 1]] for i, row in enumerate(rows)}
        ends = [range(starts[i + 1] - wanted[row], starts[i + 1]) for i, row in enumerate(rows)]
        hidden = self.model(
            torch.tensor(ids), torch.cat(positions), metas, needed_rows=torch.tensor([j for end in ends for j in end])
        )
        return dict(zip(rows, hidden.split([len(end) for end in ends]), strict=True))
