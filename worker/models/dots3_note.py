"""dots3 (text): latent attention with other sizes in layers with a window, scaled latents, a norm of the rotated keys,
a gate per head, DeepSeek V3's experts.

An index chooses `index_topk` keys per token in layers without a window (`mixers/key_index.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from quire.worker.attention.base import AttentionMetadata
from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.layers.norm import RMSNorm
from quire.worker.models.deepseek import Indexed
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.transformer.blocks import MIXERS, DecoderLayer
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.mla import Angles, InterleavedTail, MLAttention, latent_layer
from quire.worker.transformer.reader import FULL, SLIDING

_INDEXED = "indexed_attention"
_THETA = {FULL: 8e7, SLIDING: 5e4}
# sizes of layers with a window, in config.json with "swa_" in front or by layer in per_layer_config
_WINDOWED = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}


class ScaledNorm(RMSNorm):
    """A norm whose result is multiplied by `scale`."""

    def __init__(self, size: int, eps: float, scale: float):
        super().__init__(size, eps)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Dots3Attention(MLAttention):
    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        kind, size, eps = spec.layers[layer], spec.hidden_size, spec.norm_eps
        self.q_a_layernorm, self.kv_a_layernorm = (
            ScaledNorm(rank, eps, (size / rank) ** 0.5) for rank in (kind.q_lora_rank, kind.latent.rank)
        )
        rope_dim = kind.latent.rope_dim
        self.k_rope_only_layernorm = RMSNorm(rope_dim, eps)
        self.k_rope_only_layernorm.weight.view_of_tensor = InterleavedTail(rope_dim, rope_dim)

    def write(self, latent: torch.Tensor, angles: Angles | None, meta: AttentionMetadata) -> None:
        self.write_in_parts(latent, angles, meta)  # kernels know neither the scale nor the norm of the rotated keys

    def rotary_keys(self, k_pe: torch.Tensor) -> torch.Tensor:
        return self.k_rope_only_layernorm(k_pe.contiguous())

    def round_for_products(self) -> None:
        """Attach nothing: what products read is scaled after its norm."""


class Dots3Layer(DecoderLayer):
    mixers: ClassVar = MIXERS | {"mla": Dots3Attention}


class Dots3Decoder(Decoder):
    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Dots3Layer


class Dots3Note(Indexed):
    config_defaults = Indexed.config_defaults | {
        "model_type": "dots3_note_text",
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 46,
        "num_attention_heads": 128,
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-5,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "shared_experts_intermediate_size": 1536,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 1024,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "use_sliding_window": True,
        "use_dsa": None,
        "per_layer_config": None,
    }
    aliases = Indexed.aliases | {
        "sliding_window_size": "sliding_window",
        "moe_shared_expert_intermediate_size": "shared_experts_intermediate_size",
    }
    facts = {"head_gate": True, "mlp_bias": False}
    state_kinds = {_INDEXED: FULL}
    ignored = (*Indexed.ignored, r"^(model\.)?(vision|audio)_", r"^(model\.)?mtp\.")

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        return replace(super().read_config(architecture, raw), mtp=None)

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        kinds, number = values["layer_types"], values["num_hidden_layers"]
        super().complete(values, raw)
        if values["q_lora_rank"] is None:
            raise ValueError("q_lora_rank null is not supported for dots3")
        values["sliding_window"] = values["sliding_window"] or 512
        if isinstance(values["moe_layer_freq"], list):
            sparse = enumerate(values["moe_layer_freq"])
            first = values["first_k_dense_replace"]
            kinds_of_mlp = ["sparse" if has and i >= first else "dense" for i, has in sparse]
            values.update(mlp_layer_types=values["mlp_layer_types"] or kinds_of_mlp, moe_layer_freq=1)
        if kinds is None:
            full = [not values["use_sliding_window"] or i < 2 or i % 4 == 1 for i in range(number)]
            kinds = [FULL if whole else SLIDING for whole in full]
        # files without per_layer_config call indexed attention "full_attention" unless use_dsa is false
        named = values["per_layer_config"] is not None and values["use_dsa"] is None
        if (_INDEXED not in kinds) if named else values["use_dsa"] is False:
            values["index_topk"] = None
        values.update(layer_types=kinds, latent_eps=values["rms_norm_eps"])

    @classmethod
    def windowed(cls, values: dict[str, Any], raw: dict[str, Any], index: int) -> dict[str, Any]:
        """Return `values` with the sizes of layer `index`, which has a window."""
        if (by_layer := values["per_layer_config"]) is not None:  # what differs from the other layers
            own = {int(key): sizes for key, sizes in by_layer.items()}.get(index) or {}  # keys may be "02"
            own = {name: own.get(name, raw.get(name, values[name])) for name in (*_WINDOWED, "qk_rope_head_dim")}
        else:
            own = {name: raw.get(f"swa_{name}", default) for name, default in _WINDOWED.items()}
            own["qk_rope_head_dim"] = raw.get("swa_qk_rope_head_dim")
        for name, size in own.items():
            derived = (name, size) == ("qk_rope_head_dim", None)
            if (not isinstance(size, int) or size < 1) and not derived:
                raise ValueError(f"{name} of layer {index} must be a positive integer, not {size!r}")
        if own["num_key_value_heads"] != own["num_attention_heads"]:
            raise ValueError(f"num_key_value_heads of layer {index} must be its num_attention_heads for dots3")
        own["qk_rope_head_dim"] = own["qk_rope_head_dim"] or own["head_dim"] - own["qk_nope_head_dim"]
        return values | own

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        first = next((i for i, kind in enumerate(values["layer_types"]) if kind == SLIDING), None)
        own = {FULL: values} | ({} if first is None else {SLIDING: cls.windowed(values, raw, first)})
        thetas = {FULL: raw.get("rope_theta") or _THETA[FULL], SLIDING: raw.get("swa_rope_theta") or _THETA[SLIDING]}
        found = {}
        for kind, sizes in own.items():
            rope = given.get(kind) or (given.get(_INDEXED) if kind == FULL else None)
            rope = dict(rope or ({} if any(isinstance(one, dict) for one in given.values()) else given))
            rope.pop("partial_rotary_factor", None)
            turned = {"head_dim": sizes["qk_rope_head_dim"], "partial_rotary_factor": 1.0, "rope_theta": thetas[kind]}
            found[kind] = read_rope(rope, values | turned | {"rope_interleaved": True}, raw)
        return found

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        layers, found = super().layer_specs(values, raw, ropes), []
        for i, (kind, layer) in enumerate(zip(values["layer_types"], layers)):
            if kind == SLIDING:
                sizes = cls.windowed(values, raw, i)
                heads = sizes["num_attention_heads"]
                layer = latent_layer(sizes, ropes, replace(layer, num_heads=heads, num_kv_heads=heads))
                layer = replace(layer, window=values["sliding_window"])
            found.append(layer)
        return tuple(found)

    @classmethod
    def indexed(cls, values: dict[str, Any], layers: Sequence[LayerSpec]) -> list[bool]:
        return [values["index_topk"] is not None and kind in (FULL, _INDEXED) for kind in values["layer_types"]]

    @classmethod
    def moe(cls, values: dict[str, Any]) -> MoESpec:
        shared = values["shared_experts_intermediate_size"] * (values["n_shared_experts"] or 0)
        return replace(super().moe(values), shared_size=shared)

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Dots3Decoder(spec, max_model_len, weights)
