"""Zamba 2: Mamba 2, and in some layers a transformer block in front of it that reads the hidden states next to the
embeddings. There are few such blocks, used in turn; each use has low-rank adapters of its own, and its own cache.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    GateUpParallelLinear,
    Part,
    RowParallelLinear,
    Shard,
    WeightFormat,
)
from quire.worker.layers.norm import RMSNorm
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.spec.state import Mamba2Spec
from quire.worker.transformer.attention import SelfAttention, out_projection, rope_view
from quire.worker.transformer.blocks import DecoderLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.mamba_reader import time_step_limit
from quire.worker.transformer.mixers.mamba2 import Mamba2
from quire.worker.transformer.names import TensorNames
from quire.worker.transformer.per_layer import replicated
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, STATE

_HYBRID = "hybrid"
_ADAPTER = re.compile(r"_adapter_list\.(\d+)\.")
_NORM_EPS = 1e-5  # of Mamba's norm, whatever config.json says about the others
_SHARED = ("self_attn.qkv_proj", "self_attn.o_proj", "gate_up_proj", "down_proj", "input_layernorm", "pre_ff_layernorm")


class Adapter(nn.Module):
    """A product of two matrices, of which the second one is split as `shards` are."""

    def __init__(self, in_features: int, rank: int, prefix: str, shards: list[Shard], weights: WeightFormat):
        super().__init__()
        self.down = replicated(in_features, rank, f"{prefix}.0", weights)
        own = [replace(shard, prefix=f"{prefix}.1") for shard in shards]
        self.up = ColumnParallelLinear(rank, own, False, weights.linear(f"{prefix}.1"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


class AdaptedAttention(SelfAttention):
    """Reads `[T, 2 H]`; adapters add to q, k and v."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, use: int, weights: WeightFormat):
        width, kind = 2 * spec.hidden_size, spec.layers[layer]
        super().__init__(replace(spec, hidden_size=width), layer, prefix, weights)
        self.o_proj = out_projection(spec, kind, prefix, weights)
        self.adapters = nn.ModuleList()
        if spec.raw.get("use_shared_attention_adapter"):
            rank, full = spec.raw.get("adapter_rank", 128), kind.num_heads * kind.head_dim
            mine = full // tp().size
            for name in "qkv":
                shard = Shard("", full, tp().rank * mine, mine, view=None if name == "v" else rope_view(spec, kind))
                place = f"{prefix}.linear_{name}_adapter_list.{use}"
                self.adapters.append(Adapter(width, rank, place, [shard], weights))

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta, qkv = call.attn[self.attn.cache_group], self.qkv_proj(x)
        if self.adapters:
            qkv = qkv + torch.cat([adapter(x) for adapter in self.adapters], -1)
        return self.o_proj(self.attn.attend(self.write_cache(qkv, call.rotation, meta), meta))


class SharedBlock(nn.Module):
    """Maps `[T, 2 H]` to `[T, H]`. `use` counts the uses of all blocks."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, use: int, weights: WeightFormat):
        super().__init__()
        hidden, size = spec.hidden_size, spec.layers[layer].intermediate_size
        self.input_layernorm = _norm(2 * hidden, spec.norm_eps, f"{prefix}.input_layernorm")
        self.pre_ff_layernorm = _norm(hidden, spec.norm_eps, f"{prefix}.pre_ff_layernorm")
        self.self_attn = AdaptedAttention(spec, layer, f"{prefix}.self_attn", use, weights)
        place = f"{prefix}.feed_forward"
        method = weights.linear(f"{place}.gate_up_proj")
        self.gate_up_proj = GateUpParallelLinear(
            hidden, size, spec.mlp_bias, place, method, spec.hidden_act, fused=True
        )
        self.gate_up_proj.gated = None  # the activation follows the adapter
        rank, name = spec.raw.get("adapter_rank", 128), f"{place}.gate_up_proj_adapter_list.{use}"
        self.adapter = Adapter(hidden, rank, name, self.gate_up_proj.shards, weights)
        self.down_proj = RowParallelLinear(
            size, hidden, spec.mlp_bias, f"{place}.down_proj", "intermediate_size", weights.linear(f"{place}.down_proj")
        )

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        x = self.pre_ff_layernorm(self.self_attn(self.input_layernorm(x), call))
        return self.down_proj(self.gate_up_proj.activate(self.gate_up_proj.product(x) + self.adapter(x)))

    def share(self, other: SharedBlock) -> None:
        """Use the weights of another use of the same block, but for the adapters."""
        for name in _SHARED:
            place, _, last = name.rpartition(".")
            setattr(self.get_submodule(place), last, other.get_submodule(name))


class Zamba2Layer(DecoderLayer):
    """A layer whose x is the residual stream; the residual is always None. `inputs` of the call are the embeddings."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        nn.Module.__init__(self)
        kind, uses = spec.layers[layer], [i for i, one in enumerate(spec.layers) if one.attends]
        self.rope, self.block, self.linear = kind.rope, None, None
        inner = prefix
        if kind.attends:
            inner, use = f"{prefix}.mamba_decoder", uses.index(layer)
            self.number = use % num_blocks(spec)  # of the block
            first = prefix.removesuffix(str(layer)) + str(uses[self.number])
            self.block = SharedBlock(spec, layer, f"{first}.shared_transformer", use, weights)
            self.linear = replicated(spec.hidden_size, spec.hidden_size, f"{prefix}.linear", weights)
        self.input_layernorm = _norm(spec.hidden_size, spec.norm_eps, f"{inner}.input_layernorm")
        self.mamba = Mamba2(spec, layer, f"{inner}.mamba", weights)

    def forward(self, x: torch.Tensor, residual: None, call: LayerCall) -> tuple[torch.Tensor, None]:
        mixed = x
        if self.block is not None:
            everywhere = replace(call, needed_rows=None)  # Mamba reads all tokens
            mixed = x + self.linear(self.block(torch.cat([x, call.inputs], -1), everywhere))
        return call.needed(x) + self.mamba(self.input_layernorm(mixed), call), None

    def round_for_products(self) -> None:
        """Leave the norms as they are: no product rounds their results."""

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        exchange: Exchange = ((num_tokens, self.mamba.hidden_size), None)
        return [exchange] * (0 if self.block is None else 2) + self.mamba.exchanges(num_tokens, num_needed)


class Zamba2Decoder(Decoder):
    """A decoder whose later stages also receive the embeddings."""

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        first: dict[int, SharedBlock] = {}
        for layer in self.layers.values():
            if layer.block is not None and first.setdefault(layer.number, layer.block) is not layer.block:
                layer.block.share(first[layer.number])

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Zamba2Layer

    @property
    def received_width(self) -> int:
        return 2 * self.spec.hidden_size

    def forward(self, call: StageCall) -> torch.Tensor:
        x = self.embed(call) if self.first else call.hidden[:, : self.spec.hidden_size]
        embeds = x if self.first else call.hidden[:, self.spec.hidden_size :]
        for layer, layer_call in self.layer_calls(call, embeds[:, None].expand(-1, len(self.layers), -1)):
            x, _ = layer(x, None, layer_call)
        return self.norm(x) if self.last else torch.cat([x, embeds], -1)


class Zamba2(CausalLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "zamba2",
        "vocab_size": 32000,
        "hidden_size": 2560,
        "intermediate_size": None,
        "num_hidden_layers": 54,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "layers_block_type": None,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "time_step_limit": None,
        "add_bias_linear": False,
        "use_mem_rope": False,
        "use_long_context": False,
    }
    gated_activations = ("gelu",)
    state_kinds = {STATE: STATE, "mamba": STATE, _HYBRID: FULL}
    renames = {"model.norm": "model.final_layernorm"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        if (values["num_key_value_heads"] or heads) != heads:
            raise ValueError("num_key_value_heads must be num_attention_heads for Zamba 2")
        values["intermediate_size"] = values["intermediate_size"] or 4 * hidden
        values["head_dim"] = 2 * hidden // heads
        values["scale"] = (values["head_dim"] / 2) ** -0.5
        values["mlp_bias"] = values["add_bias_linear"]
        values["layer_types"] = values["layer_types"] or values["layers_block_type"]
        if values["use_long_context"]:
            values["max_position_embeddings"] = 16384

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        six = [*[STATE] * 5, _HYBRID]
        return [STATE, *six * 7, *[STATE] * 4, _HYBRID, *[STATE] * 3, _HYBRID, STATE, STATE]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return super().ropes(values, raw) if values["use_mem_rope"] else {}

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        heads, inner = values["n_mamba_heads"], int(values["mamba_expand"] * values["hidden_size"])
        low, high = time_step_limit(values)
        state = Mamba2Spec(
            heads,
            inner // heads,
            values["mamba_d_state"],
            values["mamba_ngroups"],
            values["mamba_d_conv"],
            bias=values["add_bias_linear"],
            dt_min=low,
            dt_max=high,
            norm_groups=values["mamba_ngroups"],
            eps=_NORM_EPS,
        )
        mlp, mixer = ("gated", "attention_mamba2") if layer.attends else ("none", "mamba2")
        return replace(super().layer(values, index, kind, layer), mixer=mixer, mlp=mlp, state=state)

    def has_elsewhere(self, name: str, names: TensorNames) -> bool:
        """Return True also for adapters of layers of other stages, which are among the tensors of a block's first."""
        if (match := _ADAPTER.search(name)) is not None:
            uses = [i for i, layer in enumerate(self.spec.layers) if layer.attends]
            use = int(match[1])
            return use < len(uses) and str(uses[use]) not in self.model.layers
        return super().has_elsewhere(name, names)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Zamba2Decoder(spec, max_model_len, weights)


def num_blocks(spec: ModelSpec) -> int:
    return spec.raw.get("num_mem_blocks", 1)


def _norm(size: int, eps: float, name: str) -> RMSNorm:
    norm = RMSNorm(size, eps)
    norm.weight.parts = [Part(f"{name}.weight", (size,))]
    return norm
