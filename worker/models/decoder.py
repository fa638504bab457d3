"""The decoder shared by all language models. A model is a subclass of `CausalLM` whose class attributes name the parts
that differ.

Shapes: T tokens of all requests of the step, concatenated; H = hidden size; D = head size. Module names are those of
the checkpoints, so a parameter's path is its tensor's name.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.attention.base import GroupedMetadata
from quire.worker.layers.attention import Attention
from quire.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    GateUpParallelLinear,
    Linear,
    QKVParallelLinear,
    RowParallelLinear,
    WeightFormat,
)
from quire.worker.layers.norm import RMSNorm
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.models.config import COMMON_DEFAULTS, LayerSpec, ModelSpec, complete_sizes, make_spec
from quire.worker.parallel import pp
from quire.worker.platforms.huge_pages import Workspace
from quire.worker.platforms.ops import FusedLayers, Ops

TORCH = Ops()


class SelfAttention(nn.Module):
    """Maps x `[T, H]` to `[T, H]`, or to its rows in `needed_rows`.

    The keys and values of all tokens are stored in the cache.
    """

    native_twin: ClassVar = "attention"

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        heads, dim = spec.num_attention_heads, spec.head_dim
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            dim,
            heads,
            spec.num_key_value_heads,
            spec.attention_bias,
            prefix,
            weights.linear(f"{prefix}.qkv_proj"),
        )
        self.o_proj = RowParallelLinear(
            heads * dim,
            spec.hidden_size,
            spec.attention_out_bias,
            f"{prefix}.o_proj",
            "num_attention_heads * head_dim",
            weights.linear(f"{prefix}.o_proj"),
        )
        kind = spec.layers[layer]
        self.attn = Attention(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, dim, layer, kind.window, kind.scale, kind.soft_cap
        )
        self.qk_norm_rope_write = TORCH.qk_norm_rope_write
        self.eps = spec.rms_norm_eps

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self.qk_norm_rope_write = ops.qk_norm_rope_write

    def head_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weights `[D]` of the norms over each head of q and k, or None without norms."""
        return None, None

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        attn: GroupedMetadata,
        needed_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        meta = attn[self.attn.cache_group]
        q = self.qk_norm_rope_write(
            self.qkv_proj(x),
            *self.head_norms(),
            self.eps,
            cos_sin,
            positions,
            self.attn.k_cache,
            self.attn.v_cache,
            meta.slot_mapping,
            self.attn.num_heads,
        )
        attended = self.attn.attend(q, meta)
        return self.o_proj(attended if needed_rows is None else attended[needed_rows])


class MLP(nn.Module):
    """Gated MLP: maps x `[T, H]` to `[T, H]`."""

    native_twin: ClassVar = "mlp"

    def __init__(self, spec: ModelSpec, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(
            spec.hidden_size, spec.intermediate_size, spec.mlp_bias, prefix, weights.linear(f"{prefix}.gate_up_proj")
        )
        self.down_proj = RowParallelLinear(
            spec.intermediate_size,
            spec.hidden_size,
            spec.mlp_bias,
            f"{prefix}.down_proj",
            "intermediate_size",
            weights.linear(f"{prefix}.down_proj"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection around it. The next norm adds the
    residual, so that both are one operation.

    Maps x and residual `[T, H]` to the new x and residual, `[T, H]` or their rows in `needed_rows`.
    """

    native_twin: ClassVar = "layer"

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        prefix: str,
        attention_cls: type[SelfAttention],
        mlp_cls: type[MLP],
        weights: WeightFormat = PLAIN_WEIGHTS,
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = attention_cls(spec, layer, f"{prefix}.self_attn", weights)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = mlp_cls(spec, f"{prefix}.mlp", weights)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        attn: GroupedMetadata,
        needed_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, positions, cos_sin, attn, needed_rows)
        x, residual = self.post_attention_layernorm.add(x, residual if needed_rows is None else residual[needed_rows])
        return self.mlp(x), residual


class Decoder(nn.Module):
    """The layers of this pipeline stage. The first stage also has the embedding, the last stage the final norm."""

    def __init__(
        self, spec: ModelSpec, model_cls: type[CausalLM], max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS
    ):
        super().__init__()
        stage = pp()
        self.first, self.last = stage.rank == 0, stage.rank == stage.size - 1
        if self.first:
            self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, "model.embed_tokens")
        parts = model_cls.attention_cls, model_cls.mlp_cls, weights
        self.layers = nn.ModuleDict(
            {
                str(i): model_cls.layer_cls(spec, i, f"model.layers.{i}", *parts)
                for i in stage_layers(spec.num_hidden_layers, stage.rank, stage.size)
            }
        )
        if self.last:
            self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(spec.head_dim, max_model_len, spec.rope_theta, spec.rope_scaling)
        self._ops: Ops | None = None  # None: layers are called one by one
        self._fused: FusedLayers | None = None  # built on first use: it holds addresses of the KV cache

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations."""
        self._ops, self._fused = ops if self.first and self.last else None, None

    def fused_layers(self) -> FusedLayers | None:
        """Return all layers as one call, or None if the platform does not support that."""
        if self._ops and (self._fused is None or not self._fused.fits(self.layers["0"])):
            self._fused = self._ops.fused_layers(list(self.layers.values()), self.norm, self.rotary_emb.cos_sin_cache)
            self._ops = self._ops if self._fused else None
        return self._fused

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        hidden: torch.Tensor | None = None,
        needed_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x, residual = self.embed_tokens(input_ids) if self.first else hidden, None
        if fused := self.fused_layers():
            return fused.run(x, positions, attn, needed_rows)
        cos_sin = self.rotary_emb.cos_sin_cache
        *layers, last = self.layers.values()
        for layer in layers:
            x, residual = layer(x, residual, positions, cos_sin, attn)
        x, residual = last(x, residual, positions, cos_sin, attn, needed_rows)
        return self.norm.add(x, residual)[0] if self.last else x + residual


class CausalLM(nn.Module):
    """A language model: call `model(input_ids, positions, attn)`, then `model.logits(hidden)` for the positions to
    sample.
    """

    layer_cls: type[DecoderLayer] = DecoderLayer
    attention_cls: type[SelfAttention] = SelfAttention
    mlp_cls: type[MLP] = MLP
    # keys of config.json that are read, with their defaults
    config_defaults: ClassVar[dict[str, Any]] = COMMON_DEFAULTS

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        """Return the spec of a parsed config.json. Raises ValueError, naming the key, for unsupported settings."""
        values = cls.config_defaults | {key: raw[key] for key in cls.config_defaults if key in raw}
        cls.complete(values, raw)
        complete_sizes(values)
        return make_spec(architecture, values, cls.layer_specs(values, raw), raw)

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        """Adapt `values`, which hold `config_defaults` overridden by `raw`, to the family's meaning of the keys."""

    @classmethod
    def layer_specs(cls, values: dict[str, Any], raw: dict[str, Any]) -> tuple[LayerSpec, ...]:
        """Return one spec per layer; by default all layers are equal and attend to all positions."""
        return (LayerSpec(),) * values["num_hidden_layers"]

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.spec, self.max_model_len = spec, max_model_len
        self.model = Decoder(spec, type(self), max_model_len, weights)
        if self.model.last:
            name = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
            tied_to = self.model.embed_tokens if spec.tie_word_embeddings and self.model.first else None
            self.lm_head = ParallelLMHead(spec.vocab_size, spec.hidden_size, name, tied_to, weights.head(name))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        hidden: torch.Tensor | None = None,
        needed_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map input_ids and positions `[T]` to hidden states `[T, H]`. A pipeline stage other than the first takes the
        previous stage's result as `hidden`, and may overwrite it.

        `needed_rows`, on the last stage: ascending indices `[S]` of the tokens whose result is needed, never empty; the
        result is then `[S, H]`. The last layer computes only keys and values for the other tokens.
        """
        return self.model(input_ids, positions, attn, hidden, needed_rows)

    def logits(self, hidden: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        """Map hidden `[S, H]`, of the positions to sample, to `[S, vocab_size]` float32, possibly in `workspace`.

        On the last pipeline stage only.
        """
        return self.lm_head(hidden, workspace)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[int]:
        """Number of rows `[_, H]` of each all-reduce over the tensor-parallel ranks, in order, in a forward pass over
        `num_tokens` tokens in a single stage.
        """
        return [num_tokens] * (2 * len(self.model.layers) - 1) + [num_needed] * 2

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """argmax of each row of `logits`, int64 `[S]`, or None if computing all logits is faster."""
        return self.lm_head.largest(hidden)

    def use(self, ops: Ops) -> None:
        """Switch to a platform's operations. Call `finalize` afterwards if the weights are loaded."""
        for module in self.modules():
            if module is not self and hasattr(module, "use"):
                module.use(ops)

    def finalize(self) -> None:
        """Give loaded weights to the platform's own methods.

        Called when the weights are loaded, and again after each later `use`.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.finalize()

    def has_elsewhere(self, name: str) -> bool:
        """Return whether another pipeline stage holds the checkpoint tensor `name`."""
        if match := re.match(r"model\.layers\.(\d+)\.", name):
            return match[1] not in self.model.layers and int(match[1]) < self.spec.num_hidden_layers
        return (name == "model.embed_tokens.weight" and not self.model.first) or (
            name in ("model.norm.weight", "lm_head.weight") and not self.model.last
        )


def stage_layers(num_layers: int, rank: int, num_stages: int) -> range:
    """Return the layers of pipeline stage `rank`: 7 layers over 3 stages are 3, 2, 2.

    Raises ValueError if there are more stages than layers.
    """
    if num_stages > num_layers:
        raise ValueError(f"pipeline_parallel_size {num_stages} is more than the model's num_hidden_layers {num_layers}")
    each, more = divmod(num_layers, num_stages)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))
