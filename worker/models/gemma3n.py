"""Gemma 3n (text): four residual streams of which one is active (AltUp, https://arxiv.org/abs/2301.13310), a low-rank
addition to attention (Laurel), sparse activations, per-layer inputs, and layers that read the caches of earlier
ones.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.activation import ACTIVATIONS
from quire.worker.layers.linear import PLAIN_WEIGHTS, MergedColumnParallelLinear, WeightFormat
from quire.worker.layers.norm import NORMS
from quire.worker.models.gemma import Gemma
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.rope import RopeSpec, read_ropes_by_kind
from quire.worker.transformer.blocks import DecoderLayer, SandwichLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import CausalLM, Decoder
from quire.worker.transformer.mlp import MLP
from quire.worker.transformer.per_layer import PerLayerDecoder, PerLayerGate, replicated
from quire.worker.transformer.reader import pattern, shared_layer

_HALF = 2.0**-0.5


class SparseMLP(MLP):
    """Keeps only the gates above the quantile `sparsity` of a normal distribution with their mean and deviation."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat, sparsity: float):
        super().__init__(spec, layer, prefix, weights)
        self.group, self.num_gates = tp(), spec.layers[layer].intermediate_size
        # not a gated layer: the gates are needed before the activation
        self.gate_up_proj = MergedColumnParallelLinear(
            spec.hidden_size,
            spec.layers[layer].intermediate_size,
            ("gate_proj", "up_proj"),
            spec.mlp_bias,
            prefix,
            "intermediate_size",
            weights.linear(f"{prefix}.gate_up_proj"),
        )
        self.deviations, self.activation = NormalDist().inv_cdf(sparsity), ACTIVATIONS[spec.hidden_act]

    def round_for_products(self) -> None:
        """Round nothing: `forward` activates by itself, so no kernel rounds its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        if self.group.size == 1:
            mean, deviation = gate.mean(-1, keepdim=True), gate.std(-1, keepdim=True, unbiased=False)
        else:
            mean, deviation = self._mean_and_deviation(gate)
        return self.down_proj(self.activation(F.relu(gate - (mean + deviation * self.deviations))) * up)

    def _mean_and_deviation(self, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean and standard deviation of the gates, of which each rank has a part."""
        exact = gate.float()
        mean = self.group.all_reduce(exact.sum(-1, keepdim=True)) / self.num_gates
        variance = self.group.all_reduce((exact - mean).square().sum(-1, keepdim=True)) / self.num_gates
        return mean.to(gate.dtype), variance.sqrt().to(gate.dtype)

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        gates = [] if self.group.size == 1 else [((num_tokens, 1), torch.float32)] * 2
        return [*gates, *super().exchanges(num_tokens)]


class Laurel(nn.Module):
    """Maps x `[T, H]` to x plus a normed product of low rank."""

    def __init__(self, spec: ModelSpec, prefix: str, weights: WeightFormat):
        super().__init__()
        hidden, rank = spec.hidden_size, spec.raw.get("laurel_rank", 64)
        self.linear_left = replicated(hidden, rank, f"{prefix}.linear_left", weights)
        self.linear_right = replicated(rank, hidden, f"{prefix}.linear_right", weights)
        self.post_laurel_norm = NORMS[spec.norm](hidden, spec.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class AltUp(nn.Module):
    """Predicts the streams `[A, T, H]` after a layer from those before it, and corrects the prediction by the output of
    the layer, which is computed for stream 0 only.
    """

    def __init__(self, spec: ModelSpec, prefix: str, num_streams: int):
        super().__init__()
        self.num_streams, self.input_scale = num_streams, 1.0 / spec.hidden_size
        self.correct_output_scale = nn.Parameter(torch.empty(spec.hidden_size), requires_grad=False)
        # too small to be worth another format than the checkpoint's
        self.correction_coefs = replicated(num_streams, num_streams, f"{prefix}.correction_coefs", PLAIN_WEIGHTS)
        self.prediction_coefs = replicated(num_streams, num_streams**2, f"{prefix}.prediction_coefs", PLAIN_WEIGHTS)
        self.modality_router = replicated(spec.hidden_size, num_streams, f"{prefix}.modality_router", PLAIN_WEIGHTS)
        self.router_norm = NORMS[spec.norm](spec.hidden_size, spec.norm_eps)

    def modalities(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.modality_router(self.router_norm(x) * self.input_scale)
        return torch.tanh(routed.float()).to(x.dtype)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        coefs = self.prediction_coefs(self.modalities(streams[0])).unflatten(-1, (self.num_streams, -1))
        return torch.einsum("ath,tba->bth", streams, coefs) + streams

    def correct(self, predicted: torch.Tensor, activated: torch.Tensor) -> torch.Tensor:
        coefs = self.correction_coefs(self.modalities(activated)) + 1.0
        return (activated - predicted[0]) * coefs.T[:, :, None] + predicted


class Gemma3nLayer(SandwichLayer):
    """A layer on streams x `[A, T, H]`; the residual is None."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.altup = AltUp(spec, f"{prefix}.altup", num_streams(spec))
        self.laurel = Laurel(spec, f"{prefix}.laurel", weights)
        self.gate = PerLayerGate(spec, prefix, weights)
        self.corrects_scale = spec.raw.get("altup_correct_scale", True)
        if sparsity := sparsities(spec)[layer]:
            self.mlp = SparseMLP(spec, layer, f"{prefix}.mlp", weights, sparsity)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> tuple[torch.Tensor, None]:
        predicted = self.altup.predict(x)
        normed = self.input_layernorm(predicted[0])
        attended = self.post_attention_layernorm(self.self_attn(normed, call))
        if call.needed_rows is not None:
            predicted, normed = predicted[:, call.needed_rows], normed[call.needed_rows]
        x = (predicted[0] + attended + self.laurel(normed)) * _HALF
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        corrected = self.altup.correct(predicted, x)
        first = corrected[0] * self.altup.correct_output_scale if self.corrects_scale else corrected[0]
        corrected[1:] += self.gate(first, call.needed(call.inputs))
        return corrected, None


class Gemma3nDecoder(PerLayerDecoder):
    of_first_stage = (*PerLayerDecoder.of_first_stage, "model.altup_projections")
    of_last_stage = (*PerLayerDecoder.of_last_stage, "model.altup_unembed_projections")

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        for name, here in (("altup_projections", self.first), ("altup_unembed_projections", self.last)):
            hidden, others = spec.hidden_size, range(num_streams(spec) - 1) if here else ()
            linears = [replicated(hidden, hidden, f"model.{name}.{i}", weights) for i in others]
            self.add_module(name, nn.ModuleList(linears))

    @property
    def stream_width(self) -> int:
        return num_streams(self.spec) * self.spec.hidden_size

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Gemma3nLayer

    def forward(self, call: StageCall) -> torch.Tensor:
        if self.first:
            x = self.embed(call)
            inputs = self.inputs(call.input_ids, x)
            streams = torch.stack([x, *(like(project(x), x) for project in self.altup_projections)])
        else:
            x, inputs = self.unpack(call.hidden)
            streams = x.unflatten(1, (-1, self.spec.hidden_size)).transpose(0, 1).contiguous()
        for layer, layer_call in self.layer_calls(call, inputs):
            streams, _ = layer(streams, None, layer_call)
        if not self.last:
            return self.pack(streams.transpose(0, 1).flatten(1), inputs)
        first, *others = streams
        projected = [like(project(x), first) for project, x in zip(self.altup_unembed_projections, others)]
        return self.norm(torch.stack([first, *projected]).mean(0))


def like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return x `[T, H]` scaled to the root mean square of `other`."""
    size = other.square().mean(-1, keepdim=True).sqrt()
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


def num_streams(spec: ModelSpec) -> int:
    return spec.raw.get("altup_num_inputs", 4)


def sparsities(spec: ModelSpec) -> list[float]:
    """Return the fraction of activations that each layer drops."""
    default = [0.95 if i < 10 < spec.num_hidden_layers else 0.0 for i in range(spec.num_hidden_layers)]
    return spec.raw.get("activation_sparsity_pattern") or default


class Gemma3n(CausalLM):
    config_defaults = Gemma.config_defaults | {
        "model_type": "gemma3n_text",
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "altup_active_idx": 0,
    }
    facts = {"norm": "rms_wide", "form": "sandwich", "qk_norm": "head", "v_norm": True, "scale": 1.0}
    renames = {"model.inputs": "model", "gate.post_per_layer_input_norm": "post_per_layer_input_norm"}
    ignored = (r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.",)  # of layers that read the cache of others

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return read_ropes_by_kind(values, raw, values["rope_local_base_freq"])

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        Gemma.complete.__func__(cls, values, raw)
        if values["altup_active_idx"] != 0:
            raise ValueError(f"altup_active_idx {values['altup_active_idx']} is not supported: it must be 0")
        values["logit_soft_cap"] = values["final_logit_softcapping"]
        if isinstance(values["intermediate_size"], list):  # one per layer
            values["intermediate_sizes"] = values["intermediate_size"]
            values["intermediate_size"] = max(values["intermediate_size"])

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        return pattern(values["num_hidden_layers"], 5)

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        kinds = values["layer_types"] or cls.layer_types(values)
        sizes = values.get("intermediate_sizes")
        return replace(
            layer,
            kv_from=shared_layer(kinds, values["num_kv_shared_layers"], index),
            intermediate_size=sizes[index] if sizes else layer.intermediate_size,
        )

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Gemma3nDecoder(spec, max_model_len, weights)
