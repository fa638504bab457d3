"""The decoder that all our language models share. A model is a subclass of `CausalLM` whose class attributes name the parts that differ.

Shapes: T tokens of all requests of the step side by side, H = hidden size, D = head size. Module names are those of the checkpoints, so a parameter's path
is its tensor's name.
"""

from __future__ import annotations

import re
from types import ModuleType

import torch
from torch import nn

from quire.worker.attention.base import AttentionMetadata
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu.segments import Segments
from quire.worker.layers import ops
from quire.worker.layers.attention import Attention
from quire.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.worker.layers.linear import GateUpParallelLinear, Linear, QKVParallelLinear, RowParallelLinear
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.models.hf_config import ModelSpec
from quire.worker.parallel import Group, pp
from quire.worker.platforms.huge_pages import Workspace


class SelfAttention(nn.Module):
    """x `[T, H]` -> `[T, H]`, or the rows of that in `wanted`. All tokens leave their keys and values in the cache."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str):
        super().__init__()
        heads, dim = spec.num_attention_heads, spec.head_dim
        self.qkv_proj = QKVParallelLinear(spec.hidden_size, dim, heads, spec.num_key_value_heads, spec.attention_bias, prefix)
        self.o_proj = RowParallelLinear(heads * dim, spec.hidden_size, spec.attention_out_bias, f"{prefix}.o_proj", "num_attention_heads * head_dim")
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, dim, layer, spec.layer_window(layer))
        self.qk_norm_rope_write = ops.qk_norm_rope_write
        self.eps = spec.rms_norm_eps

    def use(self, ops: ModuleType) -> None:
        """Change over to another implementation (`layers/ops.py`)."""
        self.qk_norm_rope_write = ops.qk_norm_rope_write

    def head_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weights `[D]` of the norms over each head of q and k, None where there are none."""
        return None, None

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, attn: AttentionMetadata, wanted: torch.Tensor | None = None) -> torch.Tensor:
        q = self.qk_norm_rope_write(self.qkv_proj(x), *self.head_norms(), self.eps, cos_sin, positions, self.attn.k_cache, self.attn.v_cache,
                                    attn.slot_mapping, self.attn.num_heads)
        attended = self.attn.attend(q, attn)
        return self.o_proj(attended if wanted is None else attended[wanted])


class MLP(nn.Module):
    """x `[T, H]` -> `[T, H]`, gated."""

    def __init__(self, spec: ModelSpec, prefix: str):
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, prefix)
        self.down_proj = RowParallelLinear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, f"{prefix}.down_proj", "intermediate_size")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual. The sum with the residual is left to the next norm, which does both at once.

    x and residual `[T, H]` -> both anew, `[T, H]` or the rows of that in `wanted`.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, attention_cls: type[SelfAttention], mlp_cls: type[MLP]):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = attention_cls(spec, layer, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = mlp_cls(spec, f"{prefix}.mlp")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, cos_sin: torch.Tensor, attn: AttentionMetadata,
                wanted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, positions, cos_sin, attn, wanted)
        x, residual = self.post_attention_layernorm.add(x, residual if wanted is None else residual[wanted])
        return self.mlp(x), residual


class Decoder(nn.Module):
    """The layers of this pipeline stage. The first stage has the embedding, the last one the final norm."""

    def __init__(self, spec: ModelSpec, attention_cls: type[SelfAttention], mlp_cls: type[MLP], max_model_len: int):
        super().__init__()
        stage = pp()
        self.first, self.last = stage.rank == 0, stage.rank == stage.size - 1
        if self.first:
            self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, "model.embed_tokens")
        self.layers = nn.ModuleDict({str(i): DecoderLayer(spec, i, f"model.layers.{i}", attention_cls, mlp_cls) for i in stage_layers(spec.num_hidden_layers, stage)})
        if self.last:
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(spec.head_dim, max_model_len, spec.rope_theta, spec.rope_scaling)
        self._native, self._segments = False, None  # set by `use`; made when first needed, for they need the KV cache

    def use(self, ops: ModuleType) -> None:
        """Change over to another implementation (`layers/ops.py`)."""
        self._native, self._segments = ops is cpu_ops and self.first and self.last, None

    def segments(self) -> Segments | None:
        """The layers as native calls; None where they are not all native."""
        if self._native and (self._segments is None or not self._segments.fits(self.layers["0"])):
            self._segments = Segments.of(list(self.layers.values()), self.norm, self.rotary_emb.cos_sin_cache)
            self._native = self._segments is not None
        return self._segments

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionMetadata, hidden: torch.Tensor | None = None,
                wanted: torch.Tensor | None = None) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids) if self.first else hidden, None
        if segments := self.segments():
            return segments.run(x, positions, attn, wanted)
        cos_sin = self.rotary_emb.cos_sin_cache
        *layers, last = self.layers.values()
        for layer in layers:
            x, residual = layer(x, residual, positions, cos_sin, attn)
        x, residual = last(x, residual, positions, cos_sin, attn, wanted)
        return self.norm.add(x, residual)[0] if self.last else x + residual


class CausalLM(nn.Module):
    """A language model: `model(input_ids, positions, attn)` then `model.logits(hidden)` where they are wanted."""

    attention_cls: type[SelfAttention] = SelfAttention
    mlp_cls: type[MLP] = MLP

    def __init__(self, spec: ModelSpec, max_model_len: int):
        super().__init__()
        self.spec, self.max_model_len = spec, max_model_len
        self.model = Decoder(spec, self.attention_cls, self.mlp_cls, max_model_len)
        if self.model.last:
            name = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
            tied_to = self.model.embed_tokens if spec.tie_word_embeddings and self.model.first else None
            self.lm_head = ParallelLMHead(spec.vocab_size, spec.hidden_size, name, tied_to)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attn: AttentionMetadata, hidden: torch.Tensor | None = None,
                wanted: torch.Tensor | None = None) -> torch.Tensor:
        """input_ids and positions `[T]` -> `[T, H]`. A pipeline stage but the first takes the previous one's result as `hidden`, and may overwrite it.

        `wanted`, on the last stage: ascending indices `[S]` of the tokens of which the result is wanted, one at least; it is `[S, H]` then. The last layer computes nothing
        of the others but their keys and values.
        """
        return self.model(input_ids, positions, attn, hidden, wanted)

    def logits(self, hidden: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        """hidden `[S, H]`, of the positions to sample -> `[S, vocab_size]` float32, which may lie in `workspace`. On the last pipeline stage."""
        return self.lm_head(hidden, workspace)

    def exchanges(self, num_tokens: int, num_wanted: int) -> list[int]:
        """How many rows `[_, H]` each sum over the tensor-parallel ranks has, in order, in a forward pass of that many
        tokens in a single stage.
        """
        return [num_tokens] * (2 * len(self.model.layers) - 1) + [num_wanted] * 2

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of each row of `logits` the first of the largest, int64 `[S]`, where there is a faster way than by `logits`; else None."""
        return self.lm_head.largest(hidden)

    def finalize(self) -> None:
        """Settle on the fastest kernels there are now. Called when the weights are loaded, and to be called again when more kernels have become ready."""
        fastest = ops.fastest_ops(next(self.buffers()).device)
        for module in self.modules():
            if hasattr(module, "use"):
                module.use(fastest)
            if isinstance(module, Linear):
                module.finalize()

    def has_elsewhere(self, name: str) -> bool:
        """Whether another pipeline stage holds the checkpoint tensor `name`."""
        if match := re.match(r"model\.layers\.(\d+)\.", name):
            return match[1] not in self.model.layers and int(match[1]) < self.spec.num_hidden_layers
        return (name == "model.embed_tokens.weight" and not self.model.first) or (name in ("model.norm.weight", "lm_head.weight") and not self.model.last)


def stage_layers(num_layers: int, stage: Group) -> range:
    """The layers of a pipeline stage: 7 layers over 3 stages are 3, 2, 2. Raises ValueError if there are more stages than layers."""
    if stage.size > num_layers:
        raise ValueError(f"pipeline_parallel_size {stage.size} is more than the model's num_hidden_layers {num_layers}")
    each, more = divmod(num_layers, stage.size)
    start = stage.rank * each + min(stage.rank, more)
    return range(start, start + each + (stage.rank < more))
