"""Mistral Large 4 (text): latent attention with a learned scaling of queries by position, some layers without rotary
embedding, learned factors of its frequencies, and softmax routing among groups of experts.

An index chooses `index_topk` keys per token (`mixers/key_index.py`); its queries have a scaling of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat, empty_parameter
from quire.worker.layers.norm import LayerNorm
from quire.worker.models.deepseek import Indexed
from quire.worker.parallel import tp
from quire.worker.spec.cache import LatentSizes
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import RoutingSpec
from quire.worker.spec.rope import RopeSpec, read_ropes
from quire.worker.transformer.blocks import MIXERS, DecoderLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.mixers.key_index import KeyIndex
from quire.worker.transformer.mla import MLAttention
from quire.worker.transformer.moe_reader import grouped_routing

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.rotary_emb.alpha": "lerope.alpha",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "self_attn.indexer": "attention.indexer",
    "self_attn.indexer.softmax_scaling.scale": "attention.indexer.ssmax_scaling.s",
    "self_attn.indexer.softmax_scaling.bias": "attention.indexer.ssmax_scaling.b",
    "self_attn.softmax_scaling.scale": "attention.ssmax_scaling.s",
    "self_attn.softmax_scaling.bias": "attention.ssmax_scaling.b",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "gate",
    "mlp.experts": "experts",
    "mlp.shared_expert": "shared_experts",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


class ScaledIndex(KeyIndex):
    """Makes its queries of the layer's inputs, normalised, and multiplies those of a head at position p by scale * ln(p
    + 1) + bias.
    """

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.q_input_norm = LayerNorm(spec.hidden_size, self.sizes.eps)
        self.slope, self.bias = (
            empty_parameter(self.sizes.heads, parts=[Part(f"{prefix}.{name}", (self.sizes.heads,))])
            for name in ("softmax_scaling.scale", "softmax_scaling.bias")
        )
        self.bias.dummy_mean = 1.0

    def queries(self, x: torch.Tensor, latents: torch.Tensor, call: LayerCall, tokens: torch.Tensor) -> torch.Tensor:
        q = super().queries(x, self.q_input_norm(x), call, tokens)
        factors = self.slope.float() * call.inputs[tokens][:, None] + self.bias.float()
        return q * factors[..., None].to(q.dtype)


class ScaledLatentAttention(MLAttention):
    """Multiplies the queries of a head at position p by scale * ln(p + 1) + bias."""

    index_cls: ClassVar = ScaledIndex

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        heads, mine = spec.layers[layer].num_heads, self.attn.num_heads
        self.slope, self.bias = (
            empty_parameter(mine, parts=[Part(f"{prefix}.{name}", (heads,), ((0, tp().rank * mine, mine),))])
            for name in ("softmax_scaling.scale", "softmax_scaling.bias")
        )
        self.bias.dummy_mean = 1.0

    def scale_queries(self, q: torch.Tensor, call: LayerCall) -> torch.Tensor:
        factors = self.slope.float() * call.inputs[:, None] + self.bias.float()
        return q * factors.repeat_interleave(q.shape[1] // self.attn.num_heads, 1).to(q.dtype)


class MistralLarge4Layer(DecoderLayer):
    mixers: ClassVar = MIXERS | {"mla": ScaledLatentAttention}


class MistralLarge4Decoder(Decoder):
    """A learned number per pair multiplies its rotary frequency: `alpha` is the logarithm."""

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        size = (spec.ropes["default"].rotary_dim // 2,)
        self.alpha = empty_parameter(*size, parts=[Part("model.rotary_emb.alpha", size)], dtype=torch.float32)
        self.alpha.dummy_mean = 0.0

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return MistralLarge4Layer

    def layer_calls(
        self, call: StageCall, inputs: torch.Tensor | None = None
    ) -> Iterator[tuple[DecoderLayer, LayerCall]]:
        """Give every layer the logarithm of the number of tokens so far, `[T]`."""
        counts = (call.positions + 1).float().log()
        return super().layer_calls(call, counts[:, None].expand(-1, len(self.layers)))


class MistralLarge4(Indexed):
    config_defaults = Indexed.config_defaults | {
        "model_type": "mistral_large4_text",
        "vocab_size": 204800,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 6144,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "qk_nope_head_dim": 64,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "kv_source_layers": None,
        "final_logit_softcapping": 30.0,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
    }
    renames = _NAMES
    facts = {"q_lora_rank": None}  # not read by transformers
    ignored = (*Indexed.ignored, r"^(vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\.")

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["latent_eps"] = values["rms_norm_eps"]
        values["logit_soft_cap"] = values["final_logit_softcapping"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return read_ropes(values, {**raw, "rope_parameters": raw.get("rope_parameters") or _YARN})

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        layers = super().layer_specs(values, raw, ropes)
        rotating, interval = values["no_rope_layers"], values["no_rope_layer_interval"]
        rotating = rotating or [(i + 1) % interval != 0 for i in range(len(layers))]
        sources = values["kv_source_layers"] or list(range(len(layers)))
        for key, listed in (("no_rope_layers", rotating), ("kv_source_layers", sources)):
            if len(listed) < len(layers):
                raise ValueError(f"{key} must have an entry for each of {len(layers)} layers, not {len(listed)}")
        for i, source in enumerate(sources[: len(layers)]):
            owns = source <= i and sources[source] == source
            if not owns or bool(rotating[source]) != bool(rotating[i]):
                raise ValueError(
                    f"kv_source_layers: layer {i} must read its own keys or those of an earlier layer that has its own "
                    f"and also a rotary embedding, or none, not those of layer {source}"
                )
        return tuple(
            replace(layer if turns else _still(layer), kv_from=None if source == i else source)
            for i, (layer, turns, source) in enumerate(zip(layers, rotating, sources))
        )

    @classmethod
    def routing(cls, values: dict[str, Any]) -> RoutingSpec:
        return grouped_routing(values | {"norm_topk_prob": True}, float32=True)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return MistralLarge4Decoder(spec, max_model_len, weights)

    def finalize(self) -> None:
        super().finalize()
        for table in self.model.rotary_emb.tables.values():
            table.scale_frequencies(self.model.alpha.exp())


def _still(layer: LayerSpec) -> LayerSpec:
    """Return the layer without rotary embedding, with keys of the same width."""
    sizes = layer.latent
    return replace(layer, rope=None, latent=LatentSizes(sizes.rank, layer.head_dim, 0, sizes.v_dim))
