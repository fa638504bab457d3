"""A decoder layer: a mixer of tokens and an MLP with residual connections. One class per arrangement of norms.

All map x and residual `[T, H]`, whose sum is the residual stream, to the new x and residual, `[T, H]` or their needed
rows. The next norm adds them, so that both are one operation. In the first layer the residual is None.

Names of norms are those of Llama, Gemma 2 and OLMo 2; other names are in a family's `names`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat
from quire.worker.layers.moe import give_other_parts
from quire.worker.layers.norm import NORMS, Norm, RMSNorm
from quire.worker.layers.rounding import Rounding
from quire.worker.parallel import Exchange
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import self_attention
from quire.worker.transformer.bidirectional import BidirectionalAttention
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.cross import CrossAttention
from quire.worker.transformer.mixers.block_attention import block_attention
from quire.worker.transformer.mixers.compressed import CompressedAttention
from quire.worker.transformer.mixers.convolved import ConvolvedAttention
from quire.worker.transformer.mixers.delta import GatedDeltaNet
from quire.worker.transformer.mixers.lightning import Lightning, RotaryLightning
from quire.worker.transformer.mixers.mamba1 import Mamba1
from quire.worker.transformer.mixers.mamba2 import Mamba2
from quire.worker.transformer.mixers.plamo_mamba import PlamoMamba
from quire.worker.transformer.mixers.separate_delta import SeparateDelta
from quire.worker.transformer.mixers.short_conv import ShortConv
from quire.worker.transformer.mixers.side_by_side import AttentionAndMamba2
from quire.worker.transformer.mla import MLAttention
from quire.worker.transformer.mlp import MLP, PlainMLP, ScaledMLP
from quire.worker.transformer.moe import HashMoE, MoE

# Makes a part of a layer from (spec, index of the layer, prefix of its tensors, format of its weights).
MakePart = Callable[[ModelSpec, int, str, WeightFormat], nn.Module]
MIXERS: dict[str, MakePart] = {  # by `LayerSpec.mixer`
    "attention": self_attention,
    "mla": MLAttention,
    "block_attention": block_attention,
    "compressed": CompressedAttention,
    "convolved": ConvolvedAttention,
    "bidirectional": BidirectionalAttention,
    "cross": CrossAttention,
    "short_conv": ShortConv,
    "delta": GatedDeltaNet,
    "separate_delta": SeparateDelta,
    "kimi_delta": SeparateDelta,
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "plamo_mamba": PlamoMamba,
    "attention_mamba2": AttentionAndMamba2,
    "lightning": Lightning,
    "rotary_lightning": RotaryLightning,
}
# where the tensors of a mixer are in its layer; those of others are in self_attn
PLACES = {
    "short_conv": ".conv",
    "delta": ".linear_attn",
    "separate_delta": ".linear_attn",
    "mamba1": ".mamba",
    "mamba2": ".mamba",
    "attention_mamba2": "",
    "cross": ".encoder_attn",
}

# by `LayerSpec.mlp`
MLPS: dict[str, MakePart] = {"gated": MLP, "plain": PlainMLP, "scaled": ScaledMLP, "moe": MoE, "hash_moe": HashMoE}

Streams = tuple[torch.Tensor, torch.Tensor]  # x and residual


class DecoderLayer(nn.Module):
    """A norm before attention and one before the MLP."""

    native_twin: ClassVar = "layer"
    norm_names: ClassVar = ("input_layernorm", "post_attention_layernorm")
    # norms, and the parts of the layer that read their result
    feeds: ClassVar = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))
    needs_norm: ClassVar = True  # whether a norm follows the last layer
    mixers: ClassVar = MIXERS
    mlps: ClassVar = MLPS

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        kind = spec.layers[layer]
        self.rope = kind.rope  # name of its rotary embedding
        self.residual_scale = spec.residual_scale
        for name in self.norm_names:
            self.add_module(name, NORMS[spec.norm](spec.hidden_size, spec.norm_eps))
        place = PLACES.get(kind.mixer, ".self_attn")
        self.self_attn = self.mixers[kind.mixer](spec, layer, f"{prefix}{place}", weights)
        self.mlp = self.mlps[kind.mlp](spec, layer, f"{prefix}.mlp", weights)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        x, residual = add(self.input_layernorm, x, residual)
        x = self.scaled(self.self_attn(x, call))
        x, residual = self.post_attention_layernorm.add(x, call.needed(residual))
        return self.scaled(self.mlp(x)), residual

    def round_for_products(self) -> None:
        """Let norms attach their results in 8 bits for products that take that form. Call this once the products have
        their methods.
        """
        for name, part in self.feeds:
            norm, rounding = getattr(self, name, None), rounding_of(getattr(self, part))
            if rounding is not None and isinstance(norm, RMSNorm):
                norm.round_for(rounding)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of attention or of the MLP as it is added to the residual stream."""
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        """Return the all-reduces of `forward`, in order."""
        return [*self.self_attn.exchanges(num_tokens, num_needed), *self.mlp.exchanges(num_needed)]


class ExpertsNormLayer(DecoderLayer):
    """A layer that also normalises the experts' output (A.X K1)."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.post_mlp_layernorm = None
        if spec.layers[layer].moe is not None:
            self.post_mlp_layernorm = NORMS[spec.norm](spec.hidden_size, spec.norm_eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        x, residual = super().forward(x, residual, call)
        return (x if self.post_mlp_layernorm is None else self.post_mlp_layernorm(x)), residual


class SandwichLayer(DecoderLayer):
    """Norms before and after attention, and before and after the MLP."""

    native_twin: ClassVar = "sandwich"
    norm_names: ClassVar = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    feeds: ClassVar = (("input_layernorm", "self_attn"), ("pre_feedforward_layernorm", "mlp"))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        x, residual = add(self.input_layernorm, x, residual)
        x = self.scaled(self.post_attention_layernorm(self.self_attn(x, call)))
        x, residual = self.pre_feedforward_layernorm.add(x, call.needed(residual))
        return self.scaled(self.post_feedforward_layernorm(self.feed_forward(x, residual))), residual

    def feed_forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output for x, the norm of the residual stream."""
        return self.mlp(x)


class PostNormLayer(DecoderLayer):
    """Norms only after attention and after the MLP."""

    feeds: ClassVar = ()
    norm_names: ClassVar = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        stream = x if residual is None else x + residual
        x = self.post_attention_layernorm(self.self_attn(stream, call))
        stream = call.needed(stream) + x
        return self.post_feedforward_layernorm(self.mlp(stream)), stream


class StatePreNormLayer(DecoderLayer):
    """A layer with norms before the mixer and the MLP if it has a state, else after them (OLMo-hybrid)."""

    feeds: ClassVar = ()
    norm_names: ClassVar = ("post_attention_layernorm",)

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        attends = spec.layers[layer].attends
        self.form: type[DecoderLayer] = PostNormLayer if attends else DecoderLayer
        own = "post_feedforward_layernorm" if attends else "input_layernorm"
        self.add_module(own, NORMS[spec.norm](spec.hidden_size, spec.norm_eps))
        other = Part(f"{prefix}.feedforward_layer_norm.weight", (spec.hidden_size,))
        give_other_parts(self.post_attention_layernorm.weight, [[other]])

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        return self.form.forward(self, x, residual, call)


class NormedResidualLayer(DecoderLayer):
    """The residual stream is the norm that the mixer, or the MLP, reads; `mixer_scales` of the layer multiply it and
    the mixer's output, and it and the MLP's output (MiniMax-Text-01).
    """

    feeds: ClassVar = ()

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.scales = spec.layers[layer].mixer_scales

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        alpha, beta, mlp_alpha, mlp_beta = self.scales
        x, _ = add(self.input_layernorm, x, residual)
        mixed = self.self_attn(x, call) * beta
        x, _ = self.post_attention_layernorm.add(mixed, call.needed(x) * alpha)
        return self.mlp(x) * mlp_beta, x * mlp_alpha


class SumNormLayer(DecoderLayer):
    """Norms of the sums: after attention is added to its input, and after the MLP is. The residual is always None."""

    feeds: ClassVar = ()
    needs_norm: ClassVar = False
    norm_names: ClassVar = ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> tuple[torch.Tensor, None]:
        attended = self.self_attn(x, call)
        x = self.post_attention_layernorm(call.needed(x) + attended)
        return self.post_feedforward_layernorm(x + self.mlp(x)), None


class ParallelLayer(DecoderLayer):
    """Attention and the MLP read the same norm."""

    feeds: ClassVar = (("input_layernorm", "self_attn"),)
    norm_names: ClassVar = ("input_layernorm",)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        x, residual = add(self.input_layernorm, x, residual)
        attended = self.self_attn(x, call)
        return attended + self.mlp(call.needed(x)), call.needed(residual)


class SingleLayer(DecoderLayer):
    """A norm before a mixer or an MLP; a layer has one of them (Mamba, Nemotron-H)."""

    feeds: ClassVar = ()
    norm_names: ClassVar = ("input_layernorm",)
    mixers: ClassVar = MIXERS | {"none": lambda *_: None}
    mlps: ClassVar = MLPS | {"none": lambda *_: None}

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        x, residual = add(self.input_layernorm, x, residual)
        if self.mlp is None:
            return self.self_attn(x, call), call.needed(residual)
        return self.mlp(call.needed(x)), call.needed(residual)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        if self.mlp is None:
            return self.self_attn.exchanges(num_tokens, num_needed)
        return self.mlp.exchanges(num_needed)


class OptionalMLPLayer(DecoderLayer):
    """A norm before the mixer, and one before the MLP if the layer has any. Two such layers are a decoder layer of
    Whisper: attention to tokens, then attention to the encoder's output and an MLP.
    """

    feeds: ClassVar = ()
    norm_names: ClassVar = ("input_layernorm",)
    mlps: ClassVar = MLPS | {"none": lambda *_: None}

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        if self.mlp is not None:
            self.post_attention_layernorm = NORMS[spec.norm](spec.hidden_size, spec.norm_eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, call: LayerCall) -> Streams:
        if self.mlp is not None:
            return super().forward(x, residual, call)
        x, residual = add(self.input_layernorm, x, residual)
        return self.self_attn(x, call), call.needed(residual)

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        if self.mlp is not None:
            return super().exchanges(num_tokens, num_needed)
        return self.self_attn.exchanges(num_tokens, num_needed)


# by `ModelSpec.form`
BLOCKS: dict[str, type[DecoderLayer]] = {
    "pre": DecoderLayer,
    "pre_experts_norm": ExpertsNormLayer,
    "sandwich": SandwichLayer,
    "post": PostNormLayer,
    "state_pre": StatePreNormLayer,
    "normed_residual": NormedResidualLayer,
    "sum": SumNormLayer,
    "parallel": ParallelLayer,
    "single": SingleLayer,
    "optional_mlp": OptionalMLPLayer,
}


def rounding_of(part: nn.Module) -> Rounding | None:
    """Return how the first product of a part of a layer takes its inputs, if that is in 8 bits."""
    readers = (getattr(part, name, None) for name in ("qkv_proj", "in_proj", "gate_up_proj", "experts"))
    found = (getattr(getattr(reader, "method", reader), "rounding", None) for reader in readers)
    return next((rounding for rounding in found if rounding is not None), None)


def add(norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> Streams:
    """Return the norm of the residual stream, and the stream."""
    return (norm(x), x) if residual is None else norm.add(x, residual)
