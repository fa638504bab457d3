"""DeepSeek V4: attention to a window and to compressed keys, hyper-connections, and experts that the first layers
choose by the token alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat, whole
from quire.worker.layers.norm import RMSNorm
from quire.worker.models.hy_v4 import StreamWeights, weighted
from quire.worker.spec.cache import CompressedSizes
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.rope import RopeSpec, read_rope
from quire.worker.spec.state import CompressorSpec
from quire.worker.transformer.blocks import DecoderLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.hyper_connections import HyperDecoder, HyperLayer
from quire.worker.transformer.moe import HashMoE
from quire.worker.transformer.moe_reader import MOE_DEFAULTS, MoEFamily, routing
from quire.worker.transformer.mtp import head_layer
from quire.worker.transformer.mtp_spec import WithMTP
from quire.worker.transformer.names import TensorNames
from quire.worker.transformer.reader import COMMON_DEFAULTS, SLIDING

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_NEVER_IN_8_BITS = ("compressor", "weights_proj")  # parts of names
_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # by `compress_ratios` of the published files


class V4Layer(HyperLayer):
    def feed_forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return self.mlp(x, call.needed(call.inputs)) if isinstance(self.mlp, HashMoE) else self.mlp(x)


class V4Decoder(HyperDecoder):
    """The last norm reads a weighted sum of the streams; layers read the tokens' ids."""

    of_last_stage: ClassVar = (*HyperDecoder.of_last_stage, "model.hc_head")

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        self.eps = spec.raw.get("hc_eps", 1e-6)
        if self.last:
            self.hc_head = StreamWeights(spec, "model.hc_head.hc", "model.hc_head", 1)

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return V4Layer

    def keep(self, streams: torch.Tensor) -> None:
        """Keep the last streams `[T, S * H]` for heads, as `capture` does."""
        if self._kept:
            self._kept[0][: len(streams)] = streams
        self.captured = self._kept or [streams]

    def keep_captured(self, max_num_tokens: int) -> None:
        if self.spec.has_head:
            self._kept = [self.norm.weight.new_zeros(max_num_tokens, self.received_width)]

    def layer_inputs(self, call: StageCall) -> torch.Tensor:
        return call.input_ids[:, None].expand(-1, len(self.layers))

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        if self.spec.has_head:
            self.keep(streams.flatten(1))
        return weighted(streams, self.hc_head(streams)[0] + self.eps)


class V4Head(nn.Module):
    """Head `index` of a model, see `PredictionHead`: it reads all streams `[T, S * H]` and returns its own."""

    def __init__(self, spec: ModelSpec, index: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        name, size = f"mtp.{index}", spec.hidden_size
        self.eps, self.size = spec.raw.get("hc_eps", 1e-6), size
        self.enorm, self.hnorm, self.norm = (RMSNorm(size, spec.norm_eps) for _ in range(3))
        self.fc, self.h_proj = (whole(size, size, f"{name}.{part}", weights) for part in ("fc", "h_proj"))
        self.layer = V4Layer(*head_layer(spec, index), f"{name}.layer", weights)
        self.hc_head = StreamWeights(spec, f"{name}.hc_head", f"{name}.hc_head", 1)

    @property
    def rope(self) -> str | None:
        return self.layer.rope

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        streams = self.hnorm(hidden.reshape(-1, self.size)).view(len(hidden), -1, self.size)
        streams = self.fc(self.enorm(embedded))[:, None] + self.h_proj(streams)
        return self.layer(streams, None, call)[0].flatten(1)

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        streams = hidden.view(len(hidden), -1, self.size)
        return self.norm(weighted(streams, self.hc_head(streams)[0] + self.eps))


class DeepseekV4(WithMTP, MoEFamily, CausalLM):
    config_defaults = (
        COMMON_DEFAULTS
        | MOE_DEFAULTS
        | {
            "model_type": "deepseek_v4",
            "vocab_size": 129280,
            "hidden_size": 4096,
            "intermediate_size": None,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "qk_rope_head_dim": None,
            "partial_rotary_factor": None,
            "max_position_embeddings": 1048576,
            "compress_rope_theta": 160000.0,
            "sliding_window": 128,
            "compress_rates": None,
            "compress_rate_csa": None,
            "compress_rate_hca": None,
            "compress_ratios": None,
            "q_lora_rank": 1024,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "scoring_func": "sqrtsoftplus",
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "swiglu_limit": 10.0,
            "mlp_layer_types": None,
            "num_hash_layers": 3,
        }
    )
    aliases = CausalLM.aliases | MoEFamily.aliases
    prediction_head = V4Head
    mtp_names = {"layer": "mtp.{i}", "fc": "mtp.{i}.e_proj"}
    state_kinds = {SPARSE: SPARSE, HEAVY: HEAVY}
    renames = {
        "lm_head": "head",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn": "attn",
        "sinks": "attn_sink",
        "q_a_proj": "wq_a",
        "q_b_proj": "wq_b",
        "kv_proj": "wkv",
        "o_a_proj": "wo_a",
        "o_b_proj": "wo_b",
        "mlp": "ffn",
        "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
        "mlp.shared_expert": "ffn.shared_experts",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
    }

    def tensor_names(self, names: Collection[str]) -> TensorNames:
        if "embed.weight" not in names:
            return super().tensor_names(names)
        heads = dict(self.spec.mtp.names) if self.spec.has_head else {}
        renames = self.renames | heads | {"model.embed_tokens": "embed"}
        found = TensorNames(renames, self.ignored, (r"^model\.", ""))
        found.files = names
        return found

    @classmethod
    def read_config(cls, architecture: str, raw: dict[str, Any]) -> ModelSpec:
        stored = raw.get("quantization_config")
        if isinstance(stored, dict) and stored.get("quant_method") == "fp8":
            kept = [*(stored.get("modules_to_not_convert") or []), *_NEVER_IN_8_BITS]
            experts = stored.get("expert_dtype") or raw.get("expert_dtype") or "fp8"
            own = {"modules_to_not_convert": kept, "expert_dtype": experts, "scale_name": "scale"}
            raw = {**raw, "quantization_config": stored | own}
        return super().read_config(architecture, raw)

    @classmethod
    def mtp_layer(cls, spec: ModelSpec) -> LayerSpec | None:
        """Return a layer that attends to the window only; None if compressed keys are asked for."""
        layer = next((layer for layer in reversed(spec.layers) if layer.mlp == "moe"), None)
        if layer is None or any((spec.raw.get("compress_ratios") or [])[len(spec.layers) :]):
            return None
        sizes = replace(layer.compressed, rate=0, overlap=False, top=0, index_heads=0, index_dim=0)
        return replace(layer, rope="main", compressed=sizes, state=None)

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        if (heads := values["num_key_value_heads"]) != 1:
            raise ValueError(f"num_key_value_heads must be 1 for DeepSeek V4, not {heads!r}")
        for key, wanted in (("norm_topk_prob", True), ("n_shared_experts", 1)):
            if values[key] != wanted:
                raise ValueError(f"{key} must be {wanted} for DeepSeek V4, not {values[key]!r}")
        if values["qk_rope_head_dim"] is None:
            values["qk_rope_head_dim"] = int(values["head_dim"] * (values["partial_rotary_factor"] or 1 / 8))
        values["intermediate_size"] = values["moe_intermediate_size"]
        given = {SPARSE: values["compress_rate_csa"], HEAVY: values["compress_rate_hca"]}
        values["compress_rates"] = (
            {SPARSE: 4, HEAVY: 128}
            | (values["compress_rates"] or {})
            | {kind: rate for kind, rate in given.items() if rate}
        )
        for kind, rate in values["compress_rates"].items():
            if not isinstance(rate, int) or rate < 1:
                raise ValueError(f"compress_rates: {kind} must be a positive integer, not {rate!r}")
        number = values["num_hidden_layers"]
        if values["layer_types"] is None and (ratios := values["compress_ratios"]):
            if unknown := set(ratios) - _OF_RATIO.keys():
                raise ValueError(f"compress_ratios must be 0, 4 or 128, found {sorted(unknown)}")
            values["layer_types"] = [_OF_RATIO[ratio] for ratio in ratios[:number]]  # then those of drafting layers
        hashed = values["num_hash_layers"]
        kinds = values["mlp_layer_types"] or ["hash_moe" if i < hashed else "moe" for i in range(number)]
        if set(kinds) - {"hash_moe", "moe"} or len(kinds) != number:
            raise ValueError(f"mlp_layer_types must name hash_moe or moe for each of {number} layers, found {kinds}")
        values["mlp_layer_types"] = kinds

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return [SPARSE if i > 1 and i % 2 else HEAVY for i in range(values["num_hidden_layers"])]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        nested = "main" in given and "compress" in given
        turned = values | {
            "head_dim": values["qk_rope_head_dim"],
            "partial_rotary_factor": 1.0,
            "rope_interleaved": True,
        }
        found = {}
        for name, theta in (("main", values["rope_theta"]), ("compress", values["compress_rope_theta"])):
            rope = dict(given[name]) if nested else dict(given) if name == "compress" else {}
            rope.pop("partial_rotary_factor", None)
            rope = rope | ({} if nested else {"rope_theta": theta})
            if (rope.get("rope_type") or rope.get("type")) == "yarn":
                rope.setdefault("attention_factor", 1.0)
            found[name] = read_rope(rope, turned, raw)
        return found

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        hashed, rate = values["mlp_layer_types"][index] == "hash_moe", values["compress_rates"].get(kind, 0)
        sizes = CompressedSizes(
            values["q_lora_rank"], values["qk_rope_head_dim"], values["o_groups"], values["o_lora_rank"], rate
        )
        if kind == SPARSE:
            sizes = replace(
                sizes,
                overlap=True,
                top=values["index_topk"],
                index_heads=values["index_n_heads"],
                index_dim=values["index_head_dim"],
            )
        width = values["head_dim"] + sizes.index_dim
        return replace(
            layer,
            mixer="compressed",
            attends=True,
            window=values["sliding_window"],
            rope="compress" if rate else "main",
            compressed=sizes,
            state=CompressorSpec(1 + sizes.overlap, width) if rate else None,
            mlp="hash_moe" if hashed else "moe",
            moe=cls.experts(values, hashed),
        )

    @classmethod
    def experts(cls, values: dict[str, Any], hashed: bool) -> MoESpec:
        """Return the experts of a layer, which are chosen by the token alone if it is `hashed`."""
        scores = values["scoring_func"]
        if scores not in ("sqrtsoftplus", "sigmoid", "softmax"):
            raise ValueError(f"scoring_func {scores!r} is not supported for DeepSeek V4")
        formula = routing(
            values,
            scores=scores,
            weights="normalized",
            scale=values["routed_scaling_factor"],
            epsilon=1e-20,
            correction=not hashed,
            num_hashed=values["vocab_size"] if hashed else 0,
        )
        activation = f"silu_of_bounded:{float(values['swiglu_limit']):g}"
        size = values["moe_intermediate_size"]
        return MoESpec(formula, size, activation=activation, shared_size=size)

    def read_by_heads(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.captured[0][: len(hidden)]

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return V4Decoder(spec, max_model_len, weights)
