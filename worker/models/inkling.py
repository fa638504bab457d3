"""Inkling: attention without positions but with a bias by distance, short convolutions of keys, values and of
the results of both halves of a layer, and shared experts that take part in the softmax of the routed ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.attention.distance_bias import DistanceBias
from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Linear,
    Part,
    RowParallelLinear,
    Shard,
    WeightFormat,
    empty_parameter,
)
from quire.worker.layers.moe import OneExpert, give_other_parts
from quire.worker.layers.norm import RMSNorm, rms_norm
from quire.worker.layers.state import RecurrentState, StateStep
from quire.worker.parallel import Exchange, split_size, tp
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.state import ResultConvSpec
from quire.worker.transformer.attention import SelfAttention
from quire.worker.transformer.blocks import MIXERS, MLPS, DecoderLayer, Streams, add
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.mixers.base import Convolution, float_parameter
from quire.worker.transformer.moe import MoE, WideRouterLinear
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, SLIDING

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}


def convolved(conv: Convolution, x: torch.Tensor, pages: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Add the convolution of x `[T, C]` to it, in float32."""
    return (conv(x, pages, step) + x.float()).to(x.dtype)


class InklingAttention(SelfAttention):
    """Attends with a bias by distance. Keys and values are convolved first."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        kind, group, size = spec.layers[layer], tp(), spec.raw.get("d_rel", 16)
        self.state = RecurrentState(layer, kind.state.shapes(group.size))
        heads = self.attn.num_heads
        rows = kind.num_heads * size, group.rank * heads * size, heads * size
        self.r_proj = ColumnParallelLinear(
            spec.hidden_size, [Shard(f"{prefix}.r_proj", *rows)], False, weights.linear(f"{prefix}.r_proj")
        )
        part = Part(f"{prefix}.rel_logits_proj.proj", (size, kind.bias_extent))
        self.profiles = empty_parameter(size, kind.bias_extent, parts=[part])
        channels, mine = (number * kind.head_dim for number in (kind.num_kv_heads, self.attn.num_kv_heads))
        tensors = [(f"{prefix}.{name}", channels, [(group.rank * mine, mine)]) for name in ("k_sconv", "v_sconv")]
        self.conv = Convolution(tensors, kind.state.width, False, silu=False)
        self.scaled_by_position = kind.window is None and bool(spec.raw.get("log_scaling_n_floor"))

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta = call.attn[self.attn.cache_group]
        q, kv = self.qkv_proj(x).tensor_split([self.attn.num_heads * self.attn.head_dim], -1)
        kv = convolved(self.conv, kv, self.state.pages[0], self.state.step(call.attn))
        q, k, v = self.split(torch.cat([q, kv], -1))
        q, k = (rms_norm(part.contiguous(), weight, self.eps) for part, weight in zip((q, k), self.head_norms()))
        meta.backend.write_kv(k, v, self.attn.k_cache, self.attn.v_cache, meta.slot_mapping)
        states = self.r_proj(x).unflatten(-1, (self.attn.num_heads, -1))
        if self.scaled_by_position:
            q, states = ((part.float() * call.inputs[:, None]).to(part.dtype) for part in (q, states))
        return self.o_proj(self.attn.attend(q, meta, DistanceBias(states, self.profiles)))

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return super().exchanges(num_tokens, num_tokens)


class Alternating(ColumnParallelLinear):
    """The gate and the up projections of one tensor whose rows alternate between them."""

    def __init__(self, hidden_size: int, size: int, prefix: str, weights: WeightFormat):
        mine = split_size("intermediate_size", size, tp())
        self.rows = tp().rank * mine, mine
        shards = [Shard(prefix, size, *self.rows, i * mine) for i in range(2)]
        super().__init__(hidden_size, shards, False, weights.linear(prefix))

    def weight_parts(self) -> list[Part]:
        (start, mine), name = self.rows, f"{self.shards[0].prefix}.weight"
        shape, rows = (2 * self.shards[0].full, self.in_features), ((0, 2 * start, 2 * mine),)
        return [Part(name, shape, rows, ((0, i * mine, mine),), _Every(i)) for i in range(2)]


class _Every:
    """The view of every second row, from row `first` on."""

    def __init__(self, first: int):
        self.first = first

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.first :: 2]


class InklingMLP(nn.Module):
    """A gated MLP whose result is multiplied by a learned number."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        size, hidden, name = spec.layers[layer].intermediate_size, spec.hidden_size, f"{prefix}.w2_md"
        self.up = Alternating(hidden, size, f"{prefix}.w13_dn", weights)
        self.down_proj = RowParallelLinear(size, hidden, False, name, "intermediate_size", weights.linear(name))
        self.scale = empty_parameter(1, parts=[Part(f"{prefix}.global_scale", (1,))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up) * self.scale

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [((num_tokens, self.down_proj.out_features), None)]


class InklingRouter(nn.Module):
    """Chooses experts of each row of x `[T, H]`: ((weights, ids) `[T, k]`, weights of the shared experts `[T, S]`).
    A softmax over the chosen and the shared experts makes the weights, of the logarithms of their sigmoids.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str):
        super().__init__()
        formula, self.num_shared = spec.layers[layer].moe.routing, spec.raw.get("n_shared_experts", 2)
        self.top_k, self.num_experts, self.factor = formula.top_k, formula.num_experts, formula.scale
        self.linear = WideRouterLinear(spec.hidden_size, self.num_experts + self.num_shared, prefix)
        self.correction = float_parameter(f"{prefix}.bias", (self.num_experts,), 0, self.num_experts)
        self.scale = float_parameter(f"{prefix}.global_scale", (1,), 0, 1, mean=1.0)

    def forward(self, x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        routed, shared = self.linear(x).tensor_split([self.num_experts], -1)
        ids = (routed.sigmoid() + self.correction).topk(self.top_k, -1).indices
        weights = F.logsigmoid(torch.cat([routed.gather(-1, ids), shared], -1)).softmax(-1)
        weights, of_shared = (weights * self.factor * self.scale).tensor_split([self.top_k], -1)
        return (weights, ids), of_shared


class SharedDown(Linear):
    """The down projections of the shared experts, side by side."""

    takes_adapters: ClassVar = False

    def __init__(self, experts: SharedExperts, hidden_size: int, name: str, weights: WeightFormat):
        self.parts_of_weight = [
            Part(
                name,
                (experts.num, hidden_size, experts.full),
                ((0, i, 1), (2, experts.start, experts.size)),
                ((1, i * experts.size, experts.size),),
                OneExpert(),
            )
            for i in range(experts.num)
        ]
        super().__init__(experts.num * experts.size, hidden_size, False, weights.linear(name))

    def weight_parts(self) -> list[Part]:
        return self.parts_of_weight


class SharedUp(Linear):
    """The gate projections of the shared experts, one below the other, then their up projections."""

    takes_adapters: ClassVar = False

    def __init__(self, experts: SharedExperts, hidden_size: int, name: str, weights: WeightFormat):
        size, rows = experts.size, (1, 2 * experts.start, 2 * experts.size)
        shape = experts.num, 2 * experts.full, hidden_size
        self.parts_of_weight = [
            Part(
                name, shape, ((0, i, 1), rows), ((0, (half * experts.num + i) * size, size),), OneExpert(False, half, 2)
            )
            for half in range(2)
            for i in range(experts.num)
        ]
        super().__init__(hidden_size, 2 * experts.num * size, False, weights.linear(name))

    def weight_parts(self) -> list[Part]:
        return self.parts_of_weight


class SharedExperts(nn.Module):
    """Experts that all tokens pass, with weights; this rank's part of their sum over the ranks."""

    def __init__(self, spec: ModelSpec, moe: MoESpec, prefix: str, weights: WeightFormat):
        super().__init__()
        self.num, self.full = spec.raw.get("n_shared_experts", 2), moe.intermediate_size
        self.size = split_size("moe_intermediate_size", self.full, tp())
        self.start = tp().rank * self.size
        self.up = SharedUp(self, spec.hidden_size, f"{prefix}.shared_w13_weight", weights)
        self.down = SharedDown(self, spec.hidden_size, f"{prefix}.shared_w2_weight", weights)

    def forward(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        weighted = (F.silu(gate) * up).unflatten(-1, (self.num, -1)) * factors[..., None].to(x.dtype)
        return self.down(weighted.flatten(1))


class InklingMoE(MoE):
    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.gate = InklingRouter(spec, layer, f"{prefix}.gate")
        self.shared = SharedExperts(spec, spec.layers[layer].moe, f"{prefix}.shared_experts", weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, factors = self.gate(x)
        return self.group.all_reduce(self.experts(x, *chosen) + self.shared(x, factors))


class InklingLayer(DecoderLayer):
    """All tokens pass both halves, also in the last layer: their results are convolved."""

    mixers: ClassVar = MIXERS | {"biased": InklingAttention}
    mlps: ClassVar = MLPS | {"gated": InklingMLP, "moe": InklingMoE}

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        size, width = spec.hidden_size, spec.layers[layer].state.width
        self.attn_sconv, self.mlp_sconv = (
            Convolution([(f"{prefix}.{name}", size, [(0, size)])], width, False, silu=False)
            for name in ("attn_sconv", "mlp_sconv")
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        (_, of_attention, of_mlp), step = self.self_attn.state.pages, self.self_attn.state.step(call.attn)
        x, residual = add(self.input_layernorm, x, residual)
        x = convolved(self.attn_sconv, self.self_attn(x, call), of_attention, step)
        x, residual = self.post_attention_layernorm.add(x, residual)
        x = convolved(self.mlp_sconv, self.mlp(x), of_mlp, step)
        return call.needed(x), call.needed(residual)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return super().exchanges(num_tokens, num_tokens)


class InklingDecoder(Decoder):
    """Embeddings are normalised. Their table may have more rows than the head has tokens."""

    of_first_stage = (*Decoder.of_first_stage, "model.embed_norm")
    default_floor: ClassVar[int | None] = None

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        if self.first:
            self.embed_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
            table, shape = self.embed_tokens.weight, (spec.raw.get("vocab_size", 201024), spec.hidden_size)
            table.parts = [replace(part, shape=shape) for part in table.parts]
        self.floor = spec.raw.get("log_scaling_n_floor", self.default_floor)
        self.slope = spec.raw.get("log_scaling_alpha", 0.1)

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return InklingLayer

    def embed(self, call: StageCall) -> torch.Tensor:
        x = self.embed_norm(self.embed_tokens(call.input_ids))
        if call.images is not None:
            call.images.write(x)
        return x

    def layer_calls(
        self, call: StageCall, inputs: torch.Tensor | None = None
    ) -> Iterator[tuple[DecoderLayer, LayerCall]]:
        """Give every layer the factor of queries, which grows with the logarithm of the position, `[T, 1]`."""
        if self.floor:
            factors = 1 + self.slope * ((call.positions + 1).float() / self.floor).clamp(min=1.0).log()
            inputs = factors[:, None, None].expand(-1, len(self.layers), -1)
        return super().layer_calls(call, inputs)


class Inkling(MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "inkling_text",
            "vocab_size": 201024,
            "unpadded_vocab_size": None,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "dense_intermediate_size": None,
            "num_hidden_layers": 66,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 16,
            "swa_head_dim": 128,
            "sliding_window": 512,
            "d_rel": 16,
            "rel_extent": 1024,
            "log_scaling_n_floor": None,
            "log_scaling_alpha": 0.1,
            "local_layer_ids": None,
            "conv_kernel_size": 4,
            "mlp_layer_types": None,
            "dense_mlp_idx": 0,
            "moe_intermediate_size": 3072,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "route_scale": 8.0,
            "logits_mup_width_multiplier": 24.0,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
        }
    )
    aliases: ClassVar = MoEFamily.aliases | {
        "sliding_window_size": "sliding_window",
        "sconv_kernel_size": "conv_kernel_size",
        "model_max_length": "max_position_embeddings",
        "embedding_multiplier": "logits_mup_width_multiplier",
    }
    state_kinds = _KINDS
    facts: ClassVar = {"attention_bias": False, "attention_out_bias": False, "qk_norm": "head"}
    renames: ClassVar = {
        "model.embed_tokens": "model.llm.embed",
        "model.embed_norm": "model.llm.embed_norm",
        "model.layers": "model.llm.layers",
        "model.norm": "model.llm.norm",
        "lm_head": "model.llm.unembed",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn": "attn",
        "self_attn.q_proj": "attn.wq_du",
        "self_attn.k_proj": "attn.wk_dv",
        "self_attn.v_proj": "attn.wv_dv",
        "self_attn.r_proj": "attn.wr_du",
        "self_attn.o_proj": "attn.wo_ud",
        "experts.gate_up_proj": "experts.w13_weight",
        "experts.down_proj": "experts.w2_weight",
    }
    ignored: ClassVar = (r"^model\.(audio|mtp|visual)\.",)

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["dense_intermediate_size"]:  # then the other is that of the experts
            values["moe_intermediate_size"] = values["intermediate_size"]
            values["intermediate_size"] = values["dense_intermediate_size"]
        values["vocab_size"] = min(values["vocab_size"], values["unpadded_vocab_size"] or values["vocab_size"])
        values["tie_word_embeddings"] = False
        values["logit_scale"] = 1.0 / values["logits_mup_width_multiplier"]

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        local, num = values["local_layer_ids"], values["num_hidden_layers"]
        return [SLIDING if (i in local if local is not None else (i + 1) % 6) else FULL for i in range(num)]

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        kinds = values["mlp_layer_types"]
        return kinds[index] == "sparse" if kinds else index >= values["dense_mlp_idx"]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(values, scores="sigmoid", scale=values["route_scale"], correction=True, float32=True)
        return MoESpec(formula, values["moe_intermediate_size"], interleaved=True)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer, prefix = super().layer(values, index, kind, layer), "swa_" if kind == SLIDING else ""
        heads, kv_heads, dim = (
            values[f"{prefix}{name}"] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        return replace(
            layer,
            mixer="biased",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            v_head_dim=dim,
            scale=1.0 / dim,
            rope=None,
            bias_extent=values["sliding_window"] if kind == SLIDING else values["rel_extent"],
            state=ResultConvSpec(values["conv_kernel_size"], kv_heads, dim, values["hidden_size"]),
        )

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        if self.model.last and (head := self.lm_head.weight) is not None:
            shape = spec.raw.get("vocab_size", 201024), spec.hidden_size  # files may have the padding, too
            give_other_parts(head, [[replace(part, shape=shape) for part in head.parts]])

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return InklingDecoder(spec, max_model_len, weights)
