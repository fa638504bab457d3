"""A model layer by layer, so that the memory of one layer suffices: each layer is built as a pipeline stage of its own
and computes all texts before the next one is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.worker.attention.base import AttentionMetadata
from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.cache.allocation import state_layers
from quire.worker.layers.attention import Attention
from quire.worker.layers.mla import LatentAttention
from quire.worker.layers.state import StateSteps
from quire.worker.models.registry import build_model
from quire.worker.parallel import Group, use_groups
from quire.worker.quantize.weights import Plain
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.weights.loader import load_weights

_BLOCK = 16
_TOKENS = 4096  # computed at once
_LOGITS = 512  # rows of logits at once


class _Stage(Group):
    """Stage `rank` of a pipeline whose stages do not talk to each other."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def load_stage(spec: ModelSpec, folder: str, index: int) -> CausalLM:
    """Return layer `index` with its weights; the first also has the embedding, the last the head.

    Raises:
        ValueError: layers of this family are not independent of each other.
    """
    with use_groups(pp=_Stage(index, spec.num_hidden_layers)):
        stage = build_model(spec, getattr(torch, spec.dtype), torch.device("cpu"), weights=Plain())
        load_weights(stage, spec, folder)
    return stage


@dataclass(slots=True)
class Texts:
    """Token ids `[num, length]`, and their hidden states `[num, length, H]` after the layers that were run."""

    ids: torch.Tensor
    hidden: torch.Tensor | None = None

    def run(self, stage: CausalLM) -> Texts:
        """Return the same texts after one more layer."""
        length = self.ids.shape[1]
        num = max(1, _TOKENS // length)
        caches = _Caches(stage, num, length)
        parts = []
        for start in range(0, len(self.ids), num):
            ids = self.ids[start : start + num]
            hidden = None if self.hidden is None else self.hidden[start : start + num].flatten(0, 1).clone()
            positions = torch.arange(length).repeat(len(ids))
            out = stage(ids.flatten(), positions, caches.metadata(len(ids)), hidden)
            parts.append(out.view(len(ids), length, -1))
        return Texts(self.ids, torch.cat(parts))

    def perplexity(self, last: CausalLM) -> float:
        """Return the exp of the mean surprise of all tokens except the first of each text, by the head of the last
        stage.
        """
        total = 0.0
        for ids, hidden in zip(self.ids, self.hidden, strict=True):
            for start in range(0, len(ids) - 1, _LOGITS):
                targets = ids[start + 1 : start + 1 + _LOGITS]
                logits = last.logits(hidden[start : start + len(targets)])
                total += float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
        return float(torch.tensor(total / (len(self.ids) * (self.ids.shape[1] - 1))).exp())


class _Caches:
    """The KV cache and the recurrent states of a stage for `num` texts of `length` tokens."""

    def __init__(self, stage: CausalLM, num: int, length: int):
        self.length, blocks = length, -(-length // _BLOCK)
        self.table = torch.arange(1, num * blocks + 1, dtype=torch.int32).view(num, blocks)  # block 0 is the null block
        self.backend = CpuPagedAttention()
        for layer in state_layers(stage):
            layer.cache_group = 1
            layer.pages = [torch.zeros(num + 1, *shape) for shape in layer.shapes]  # page 0 is the null page
        for layer in stage.modules():
            if isinstance(layer, Attention):
                shape = num * blocks + 1, layer.num_kv_heads, _BLOCK
                layer.k_cache, layer.v_cache = (
                    torch.zeros(*shape, dim, dtype=stage.dtype).transpose(1, 2)
                    for dim in (layer.head_dim, layer.v_head_dim)
                )
                if isinstance(layer, LatentAttention):
                    layer.v_cache = layer.k_cache[..., : layer.v_head_dim]

    def metadata(self, num: int) -> tuple[AttentionMetadata, ...]:
        slots = torch.arange(self.length)
        table = self.table[:num]
        starts, lengths = [i * self.length for i in range(num + 1)], [self.length] * num
        meta = AttentionMetadata(
            self.backend,
            (table.long()[:, slots // _BLOCK] * _BLOCK + slots % _BLOCK).flatten(),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            table,
            self.length,
            self.length,
            host=(starts, lengths),
        )
        pages = torch.stack([torch.zeros(num), torch.arange(1, num + 1)], 1).int()  # from nothing to one for each text
        states = replace(meta, backend=StateSteps(), block_table=pages)
        for one in (meta, states):
            one.backend.build(one)
        return meta, states


def cut(ids: Sequence[int], length: int, most: int, bos: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of a text as texts of `length` tokens: (at most `most` from its beginning, those of its last
    quarter, at most 64). Each begins with `bos` if there is one.

    Raises:
        ValueError: the text is too short.
    """
    body = length - (bos is not None)
    num = len(ids) // body
    if num < 2:
        raise ValueError(
            f"the text has {len(ids)} tokens; at least {2 * body} are needed: give a longer one, or a smaller "
            "--sequence-length"
        )
    rows = torch.tensor(ids[: num * body]).view(num, body)
    if bos is not None:
        rows = torch.cat((torch.full((num, 1), bos), rows), 1)
    held = max(1, min(64, num // 4))
    return rows[: min(most, num - held)], rows[-held:]
