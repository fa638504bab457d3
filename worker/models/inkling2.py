"""Inkling 2: Inkling's bias by distance and convolutions with heads of bounded length, sinks and gates that
depend on the token, and layers that read weighted sums of earlier blocks of layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.attention.distance_bias import DistanceBias
from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Part,
    Shard,
    WeightFormat,
    empty_parameter,
)
from quire.worker.layers.norm import NORMS, Norm, rms_norm
from quire.worker.layers.rowwise import sigmoid
from quire.worker.layers.state import RecurrentState, StateStep
from quire.worker.layers.states.short_conv import own_conv
from quire.worker.models.inkling import Inkling, InklingDecoder
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.transformer.attention import SelfAttention
from quire.worker.transformer.blocks import MIXERS, DecoderLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.mixers.base import Convolution, float_parameter
from quire.worker.transformer.moe_reader import routing

# config.json of the published files does not say that routed experts are MXFP8, and the rest is not
_WRAPPER = "Inkling2ForConditionalGeneration"
_MXFP8 = {
    "quant_method": "fp8",
    "weight_block_size": [1, 32],
    "scale_exponents": True,
    "modules_to_not_convert": ["self_attn", "lm_head"],
}
_FULL_NORMS = ("q_input_layernorm", "k_input_layernorm", "v_input_layernorm")


def clipped(x: torch.Tensor, most: float, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the vectors x `[.., D]`, times a scale if there is one, made shorter if their length exceeds `most`."""
    wide = x.float() if scale is None else x.float() * scale
    length = wide.square().sum(-1, keepdim=True).sqrt()
    return (wide * (most / (length + 1e-6)).clamp(max=1.0)).to(x.dtype)


def convolved(conv: Convolution, x: torch.Tensor, pages: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Add the convolution of x `[T, C]` to it, in float32, as if all were of one size."""
    return ((conv(x, pages, step) + x.float()) * (len(conv.weight) + 1) ** -0.5).to(x.dtype)


class OwnConvolution(nn.Module):
    """A convolution of keys or values whose weights have a part of each token."""

    def __init__(self, spec: ModelSpec, kind: LayerSpec, prefix: str, weights: WeightFormat):
        super().__init__()
        width, number, group = kind.state.width, kind.num_kv_heads, tp()
        mine = number // group.size
        name, rows = f"{prefix}.weight_proj", mine * width
        shard = Shard(name, number * width, group.rank * rows, rows)
        self.heads, self.width = mine, width
        self.taps = ColumnParallelLinear(spec.hidden_size, [shard], False, weights.linear(name))
        shape, own = (width, number * kind.head_dim), mine * kind.head_dim
        part = Part(f"{prefix}.static_w", shape, ((1, group.rank * own, own),))
        self.weight = empty_parameter(width, own, parts=[part], dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weights of the tokens with inputs x, `[T, heads, K]`."""
        return self.taps(x).float().unflatten(-1, (self.heads, self.width))


class Inkling2Attention(SelfAttention):
    """Attends with a bias by distance. Keys and values are convolved first. In layers without a window q, k and v have
    inputs of their own, x `[3, T, H]`.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        kind, group, size = spec.layers[layer], tp(), spec.raw.get("d_rel", 16)
        self.state = RecurrentState(layer, kind.state.shapes(group.size))
        heads, dim = self.attn.num_heads, kind.head_dim
        self.r_proj, self.sink_proj = (
            ColumnParallelLinear(
                spec.hidden_size,
                [Shard(f"{prefix}.{name}", kind.num_heads * rows, group.rank * heads * rows, heads * rows)],
                False,
                weights.linear(f"{prefix}.{name}"),
            )
            for name, rows in (("r_proj", size), ("sink_proj", 1))
        )
        part = Part(f"{prefix}.rel_logits_proj.proj", (size, kind.bias_extent))
        self.profiles = empty_parameter(size, kind.bias_extent, parts=[part])
        self.q_scale, self.rel_scale = (
            float_parameter(f"{prefix}.{name}.scale", (kind.num_heads, rows), group.rank * heads, heads, mean=1.0)
            for name, rows in (("q_l2_clip", dim), ("rel_l2_clip", size))
        )
        self.most = spec.raw.get("qk_l2_clip_threshold", 512**0.5), spec.raw.get("rel_l2_clip_threshold", 8.0)
        self.is_full, mine = kind.window is None, self.attn.num_kv_heads * dim
        if self.is_full:
            shards, self.qkv_proj = self.qkv_proj.shards, None
            self.q_proj, self.k_proj, self.v_proj = (
                ColumnParallelLinear(spec.hidden_size, [replace(one, target=0)], False, weights.linear(one.prefix))
                for one in shards
            )
            self.k_conv, self.v_conv = (
                OwnConvolution(spec, kind, f"{prefix}.{name}", weights) for name in ("k_sconv", "v_sconv")
            )
        else:
            rows = [(group.rank * mine, mine)]
            names = [f"{prefix}.{name}" for name in ("k_sconv", "v_sconv")]
            tensors = [(name, kind.num_kv_heads * dim, rows) for name in names]
            self.conv = Convolution(tensors, kind.state.width, False, silu=False)

    def forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        meta, step = call.attn[self.attn.cache_group], self.state.step(call.attn)
        q, kv = self._full(x, step) if self.is_full else self._sliding(x, step)
        x = x[0] if self.is_full else x
        heads, dim = self.attn.num_heads, self.attn.head_dim
        q = clipped(q.unflatten(-1, (heads, dim)), self.most[0], self.q_scale)
        k, v = (part.unflatten(-1, (-1, dim)).contiguous() for part in kv.chunk(2, -1))
        k, v = clipped(k, self.most[0]), rms_norm(v, None, self.eps)
        meta.backend.write_kv(k, v, self.attn.k_cache, self.attn.v_cache, meta.slot_mapping)
        states = clipped(self.r_proj(x).unflatten(-1, (heads, -1)), self.most[1], self.rel_scale)
        if self.is_full:
            q, states = ((part.float() * call.inputs[:, None]).to(part.dtype) for part in (q, states))
        attended = self.attn.attend(q, meta, DistanceBias(states, self.profiles, self.sink_proj(x)))
        return self.o_proj((attended.float() * sigmoid(self.g_proj(x).float())).to(attended.dtype))

    def _sliding(self, x: torch.Tensor, step: StateStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q, and the convolved keys and values side by side."""
        q, kv = self.qkv_proj(x).tensor_split([self.attn.num_heads * self.attn.head_dim], -1)
        return q, convolved(self.conv, kv, self.state.pages[0], step)

    def _full(self, x: torch.Tensor, step: StateStep) -> tuple[torch.Tensor, torch.Tensor]:
        of_q, of_k, of_v = x
        kv = torch.cat([self.k_proj(of_k), self.v_proj(of_v)], -1)
        taps = torch.cat([self.k_conv(of_k), self.v_conv(of_v)], 1)
        weight = torch.cat([self.k_conv.weight, self.v_conv.weight], 1)
        mixed = own_conv(kv, taps, weight, self.state.pages[0], step) + kv.float()
        return self.q_proj(of_q), (mixed * (2 * len(weight) + 1) ** -0.5).to(kv.dtype)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return super().exchanges(num_tokens, num_tokens)


class EarlierBlocks(nn.Module):
    """Maps blocks `[T, B, H]` and x `[T, H]` to sums of their norms, with weights that each of several learned queries
    gives them: float32 `[queries, T, H]`.
    """

    def __init__(self, spec: ModelSpec, name: str, number: int = 1):
        super().__init__()
        shape = (number, spec.hidden_size) if number > 1 else (spec.hidden_size,)
        part = Part(f"model.attn_res.{name}", shape, view=lambda tensor: tensor.view(number, -1))
        self.query = empty_parameter(number, spec.hidden_size, parts=[part], dtype=torch.float32)

    def forward(self, blocks: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        states = rms_norm(torch.cat([blocks.float(), x.float()[:, None]], 1), None, 1e-6)
        weights = (states @ self.query.t() * states.shape[-1] ** -0.5).softmax(1)  # [T, B + 1, number]
        return (weights.transpose(1, 2) @ states).transpose(0, 1)


class Inkling2Layer(DecoderLayer):
    """Maps x `[T, H]` and the residual, the inputs of the blocks so far `[T, B, H]`, to the new ones. All tokens pass
    both halves, also in the last layer: their results are convolved.
    """

    mixers: ClassVar = MIXERS | {"biased": Inkling2Attention}
    norm_names: ClassVar = ("post_attention_layernorm",)
    feeds: ClassVar = ()

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        size, kind = spec.hidden_size, spec.layers[layer]
        self.begins_block = layer % block_size(spec) == 0
        self.own_norms = _FULL_NORMS if kind.window is None else ("input_layernorm",)
        for name in self.own_norms:
            self.add_module(name, NORMS[spec.norm](size, spec.norm_eps))
        number = len(self.own_norms)
        self.attn_input = EarlierBlocks(spec, f"attn_queries.{layer - 1}", number) if layer else None
        self.mlp_input = EarlierBlocks(spec, f"mlp_queries.{layer}")
        self.attn_sconv, self.mlp_sconv = (
            Convolution([(f"{prefix}.{name}", size, [(0, size)])], kind.state.width, False, silu=False)
            for name in ("attn_sconv", "mlp_sconv")
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        (_, of_attention, of_mlp), step = self.self_attn.state.pages, self.self_attn.state.step(call.attn)
        read = self.read(x, residual)
        stream = convolved(self.attn_sconv, self.self_attn(read, call), of_attention, step).float()
        if self.begins_block:
            residual = torch.cat([residual, x[:, None]], 1)
        else:
            stream = x.float() + stream
        read = normed(self.mlp_input(residual, stream)[0], self.post_attention_layernorm, x.dtype)
        out = convolved(self.mlp_sconv, self.mlp(read), of_mlp, step)
        return call.needed((stream + out.float()).to(x.dtype)), call.needed(residual)

    def read(self, x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return the input of attention, `[T, H]`, or `[3, T, H]` for q, k and v."""
        norms = [getattr(self, name) for name in self.own_norms]
        inputs = [x] * len(norms) if self.attn_input is None else self.attn_input(blocks, x)
        read = [normed(one, norm, x.dtype) for one, norm in zip(inputs, norms)]
        return torch.stack(read) if len(read) > 1 else read[0]

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        return super().exchanges(num_tokens, num_tokens)


def normed(x: torch.Tensor, norm: Norm, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of x, which may be wider than the model's `dtype`."""
    return rms_norm(x, norm.weight, norm.eps).to(dtype)


def block_size(spec: ModelSpec) -> int:
    """Return the number of layers of a block."""
    return spec.raw.get("n_layers_per_attn_res_block", 6)


class Inkling2Decoder(InklingDecoder):
    """The last norm reads a weighted sum of the blocks, too. A stage sends the inputs of all blocks so far along with
    its hidden states.
    """

    default_floor: ClassVar = 128000

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        if self.last:
            self.final_input = EarlierBlocks(spec, "output_query")

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Inkling2Layer

    @property
    def received_width(self) -> int:
        return (1 - (-self._first_layer // block_size(self.spec))) * self.spec.hidden_size

    def forward(self, call: StageCall) -> torch.Tensor:
        if self.first:
            x = self.embed(call)
            blocks = x.new_empty(len(x), 0, x.shape[1])
        else:
            received = call.hidden.unflatten(1, (-1, self.spec.hidden_size))
            x, blocks = received[:, 0], received[:, 1:]
        for layer, layer_call in self.layer_calls(call):
            x, blocks = layer(x, blocks, layer_call)
        if self.last:
            return normed(self.final_input(blocks, x)[0], self.norm, x.dtype)
        return torch.cat([x[:, None], blocks], 1).flatten(1)


class Inkling2(Inkling):
    config_defaults = Inkling.config_defaults | {
        "model_type": "inkling2_text",
        "unpadded_vocab_size": 200058,
        "hidden_size": 4608,
        "num_hidden_layers": 48,
        "num_attention_heads": 48,
        "swa_num_attention_heads": 48,
        "swa_num_key_value_heads": 8,
        "sliding_window": 1024,
        "log_scaling_n_floor": 128000,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 2304,
        "num_experts": 384,
        "num_experts_per_tok": 8,
        "qk_l2_clip_threshold": 512**0.5,
        "rel_l2_clip_threshold": 8.0,
        "n_layers_per_attn_res_block": 6,
        "mlp_gate_softcap": 4.0,
        "mlp_up_softcap": 25.0,
        "final_logit_softcapping": 30.0,
        "scoring_func": "sigmoid",
    }
    aliases: ClassVar = Inkling.aliases | {"routed_scaling_factor": "route_scale"}
    facts: ClassVar = {"attention_bias": False, "attention_out_bias": False, "norm": "rms_wide", "entry_gate": True}
    renames: ClassVar = Inkling.renames | {
        "self_attn.g_proj": "attn.gate_attn",
        "self_attn.sink_proj": "attn.attn_sink_proj",
        "k_sconv.weight_proj.weight": "k_sconv.weight_proj",
        "v_sconv.weight_proj.weight": "v_sconv.weight_proj",
        "mlp.gate.e_score_correction_bias": "mlp.gate.bias",
        "model.attn_res": "model.llm.attn_res",
        "experts.gate_up_proj_scale_inv": "experts.w13_weight_scale",
        "experts.down_proj_scale_inv": "experts.w2_weight_scale",
        **{name: name.replace("layernorm", "norm") for name in _FULL_NORMS},
    }
    ignored: ClassVar = (*Inkling.ignored, r"^model\.llm\.attn_res\.")  # queries of other stages

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        written = {"quantization_config", "transformers_version"} & raw.keys()  # the latter in files without MXFP8
        if _WRAPPER in (raw.get("architectures") or []) and not written:
            raw = {**raw, "quantization_config": _MXFP8}
        return super().read_config(architecture, raw)

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if values["scoring_func"] != "sigmoid":
            raise ValueError(f"scoring_func must be sigmoid for Inkling 2, not {values['scoring_func']!r}")
        size = values["n_layers_per_attn_res_block"]
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"n_layers_per_attn_res_block must be a positive integer, not {size!r}")
        values["intermediate_size"] = values["moe_intermediate_size"]
        super().complete(values, raw)
        values.update(logit_scale=1.0, logit_soft_cap=values["final_logit_softcapping"])

    @classmethod
    def is_sparse(cls, values: dict[str, Any], index: int) -> bool:
        return True

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        formula = routing(
            values,
            scores="sigmoid",
            weights="normalized",
            scale=values["route_scale"],
            epsilon=1e-20,
            correction=True,
            float32=True,
        )
        limits = float(values["mlp_gate_softcap"]), float(values["mlp_up_softcap"])
        activation = "softly_bounded_silu:{:g}:{:g}".format(*limits)
        return MoESpec(formula, values["moe_intermediate_size"], activation=activation, interleaved=True)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        return replace(super().layer(values, index, kind, layer), scale=None)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Inkling2Decoder(spec, max_model_len, weights)
