"""The parts of vision encoders. Their layers are whole on every rank, and compute all patches of several images
as one matrix: T patches of all images, C = hidden size of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.activation import ACTIVATIONS, GATED
from quire.worker.layers.linear import PLAIN, ColumnParallelLinear, LinearMethod, Part, Shard, WeightFormat
from quire.worker.layers.norm import LayerNorm, Norm, RMSNorm
from quire.worker.layers.rotary import apply_rotary


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of that name in config.json. Raises ValueError if it is not supported."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} of the vision encoder is not supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def linear(
    in_features: int,
    out_features: int | Sequence[int],
    names: str | Sequence[str],
    weights: WeightFormat,
    bias: bool = True,
    method: LinearMethod | None = None,
) -> ColumnParallelLinear:
    """Return a linear layer that every rank holds whole: the tensors `names`, with `out_features` rows each, as one
    matrix.
    """
    names = [names] if isinstance(names, str) else list(names)
    sizes = [out_features] * len(names) if isinstance(out_features, int) else list(out_features)
    starts = accumulate(sizes, initial=0)
    shards = [Shard(name, size, 0, size, start) for name, size, start in zip(names, sizes, starts)]
    return ColumnParallelLinear(in_features, shards, bias, method or weights.linear(names[0]))


def named(norm: Norm, name: str) -> Norm:
    """Return `norm` with the tensors `name`.weight and `name`.bias of the checkpoint."""
    for key, parameter in norm.named_parameters():
        view = getattr(parameter, "view_of_tensor", None)
        parameter.parts = [Part(f"{name}.{key}", tuple(parameter.shape), view=view)]
    return norm


def table(name: str, *shape: int) -> nn.Parameter:
    """Return an uninitialised parameter that holds the checkpoint's tensor `name`, which may have further dimensions of
    1.
    """
    parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
    parameter.parts = [Part(name, shape)]
    return parameter


def rename_parts(module: nn.Module, names: Mapping[str, str]) -> None:
    """Replace parts of the names of the checkpoint's tensors, one after another."""
    for parameter in module.parameters():
        renamed = (reduce(lambda name, pair: name.replace(*pair), names.items(), part.name) for part in parameter.parts)
        parameter.parts = [replace(part, name=name) for part, name in zip(parameter.parts, renamed)]


class PatchEmbedding(ColumnParallelLinear):
    """Maps images `[B, 3, height, width]` to the embeddings of their patches, `[B, rows, columns, C]`: a convolution
    whose stride is its size, as one matrix product. Pixels beyond the last whole patch are not seen.
    """

    def __init__(self, size: int, patch: int, name: str, bias: bool):
        self.patch, self.name = patch, name
        super().__init__(3 * patch * patch, [Shard(name, size, 0, size)], bias, PLAIN)

    def weight_parts(self) -> list[Part]:
        shape = (self.out_features, 3, self.patch, self.patch)
        return [Part(f"{self.name}.weight", shape, view=partial(torch.flatten, start_dim=1))]

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = pixels.shape
        rows, columns = height // self.patch, width // self.patch
        pixels = pixels[:, :, : rows * self.patch, : columns * self.patch]
        patches = pixels.reshape(batch, 3, rows, self.patch, columns, self.patch).permute(0, 2, 4, 1, 3, 5)
        return super().forward(patches.reshape(batch * rows * columns, -1)).view(batch, rows, columns, -1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float | None = None
) -> torch.Tensor:
    """Attend from every patch to all patches of its image, `[T, heads, D]` each, for images of `lengths` patches.

    Neighbours of equal length share a call. `scale` is D ** -0.5 by default.
    """
    runs = [(length, len(list(images))) for length, images in groupby(lengths)]
    parts = zip(runs, *(x.split([length * count for length, count in runs]) for x in (q, k, v)))
    attended = []
    for (length, count), *part in parts:
        batched = [x.unflatten(0, (count, length)).transpose(1, 2) for x in part]
        attended.append(F.scaled_dot_product_attention(*batched, scale=scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)


@dataclass(frozen=True)
class LayerNames:
    """The checkpoint's names of an encoder layer's tensors, below the layer's prefix."""

    norm1: str = "layer_norm1"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one tensor
    out: str = "out_proj"
    norm2: str = "layer_norm2"
    up: tuple[str, ...] = ("mlp.fc1",)  # two of a gated MLP
    down: str = "mlp.fc2"
    scales: tuple[str, ...] = ()  # factors `[C]` of both halves
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")


# fields of an encoder and their keys in config.json
_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "act": "hidden_act",
    "eps": "layer_norm_eps",
}


@dataclass(frozen=True)
class EncoderSpec:
    """The sizes of an encoder, all of whose layers are equal."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    act: str
    eps: float
    norm: str = "layer"  # layer or rms
    qkv_bias: bool = True
    bias: bool = True  # for the other linear layers
    qk_norm: bool = False  # rms, over all heads together
    head_norm: bool = False  # rms of q and k, each head by itself
    num_kv_heads: int | None = None  # fewer than heads; None: as many
    names: LayerNames = LayerNames()

    @classmethod
    def read(cls, vision: Mapping[str, Any], **others: Any) -> EncoderSpec:
        """Return the sizes that a `vision_config` names as most encoders of transformers do; `others` replace them."""
        sizes = {key: vision[name] for key, name in _KEYS.items() if key not in others}
        return cls(**sizes, **others)

    def make_norm(self, name: str) -> Norm:
        return named((LayerNorm if self.norm == "layer" else RMSNorm)(self.hidden_size, self.eps), name)


class SelfAttention(nn.Module):
    """Maps x `[T, C]` to `[T, C]`. Patches attend to those of their own image."""

    def __init__(self, spec: EncoderSpec, prefix: str, weights: WeightFormat):
        super().__init__()
        size, prefix = spec.hidden_size, f"{prefix}.{spec.names.attention}"
        names = [f"{prefix}.{name}" for name in spec.names.qkv]
        self.norms, self.head_norms, self.head_dim = spec.qk_norm, spec.head_norm, size // spec.num_heads
        self.group = spec.num_heads // (spec.num_kv_heads or spec.num_heads)
        self.sizes = [size, size // self.group, size // self.group]
        rows = self.sizes if len(names) == 3 else [sum(self.sizes)]
        self.qkv = linear(size, rows, names, weights, spec.qkv_bias)
        self.out = linear(size, size, f"{prefix}.{spec.names.out}", weights, spec.bias)
        if spec.qk_norm or spec.head_norm:
            normed, eps = (self.head_dim, spec.eps) if spec.head_norm else (size, 1e-6)
            self.q_norm, self.k_norm = (named(RMSNorm(normed, eps), f"{prefix}.{n}") for n in spec.names.qk_norms)

    def forward(self, x: torch.Tensor, lengths: Sequence[int], cos_sin: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv(x).split(self.sizes, -1)
        if self.norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.head_norms:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        if cos_sin is not None:
            q, k = apply_rotary(q, cos_sin), apply_rotary(k, cos_sin)
        if self.group > 1:
            k, v = (part.repeat_interleave(self.group, 1) for part in (k, v))
        return self.out(attend(q, k, v, lengths).flatten(1))


class FeedForward(nn.Module):
    """Maps x `[T, C]` to `[T, C]`: down(activation(up(x))), with two up projections activation(first) * second."""

    def __init__(self, spec: EncoderSpec, prefix: str, weights: WeightFormat):
        super().__init__()
        names = [f"{prefix}.{name}" for name in spec.names.up]
        self.up = linear(spec.hidden_size, spec.intermediate_size, names, weights, spec.bias)
        self.down = linear(spec.intermediate_size, spec.hidden_size, f"{prefix}.{spec.names.down}", weights, spec.bias)
        act = activation(spec.act)
        self.activate = act if len(names) == 1 else GATED.get(spec.act) or partial(_gated, act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activate(self.up(x)))


def _gated(act: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return act(gate) * up


class EncoderLayer(nn.Module):
    """Attention and an MLP, each after a norm and added to its input."""

    def __init__(self, spec: EncoderSpec, prefix: str, weights: WeightFormat):
        super().__init__()
        names = spec.names
        self.norm1, self.norm2 = (spec.make_norm(f"{prefix}.{name}") for name in (names.norm1, names.norm2))
        self.attention, self.mlp = SelfAttention(spec, prefix, weights), FeedForward(spec, prefix, weights)
        self.scales = nn.ParameterList([table(f"{prefix}.{name}", spec.hidden_size) for name in names.scales])

    def forward(self, x: torch.Tensor, lengths: Sequence[int], cos_sin: torch.Tensor | None = None) -> torch.Tensor:
        first, second = self.scales if len(self.scales) else (None, None)
        x = _add(x, self.attention(self.norm1(x), lengths, cos_sin), first)
        return _add(x, self.mlp(self.norm2(x)), second)


def _add(x: torch.Tensor, change: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return x + change if scale is None else torch.addcmul(x, change, scale)


class Encoder(nn.Module):
    """The layers `prefix`.0, `prefix`.1 ..., one after another."""

    def __init__(self, spec: EncoderSpec, prefix: str, weights: WeightFormat):
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(spec, f"{prefix}.{i}", weights) for i in range(spec.num_layers)])

    def forward(self, x: torch.Tensor, lengths: Sequence[int], cos_sin: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, lengths, cos_sin)
        return x


class Projector(nn.Module):
    """Maps features `[T, in_features]` to embeddings `[T, hidden_size]`: two linear layers and an activation."""

    def __init__(
        self,
        config: dict[str, Any],
        in_features: int,
        weights: WeightFormat,
        bias: bool = True,
        prefix: str = "multi_modal_projector",
    ):
        super().__init__()
        size = config["text_config"]["hidden_size"]
        bias = config.get("multimodal_projector_bias", bias)
        self.linear_1 = linear(in_features, size, f"{prefix}.linear_1", weights, bias)
        self.linear_2 = linear(size, size, f"{prefix}.linear_2", weights, bias)
        self.activate = activation(config.get("projector_hidden_act", "gelu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.activate(self.linear_1(x)))


def num_used_layers(config: dict[str, Any], num_layers: int, default: int) -> int:
    """Return how many of an encoder's layers compute the features that config.json selects with `vision_feature_layer`.

    Raises ValueError for a list of layers.
    """
    layer = config.get("vision_feature_layer", default)
    if not isinstance(layer, int):
        raise ValueError(f"vision_feature_layer {layer} is not supported: only one layer is")
    return layer if layer >= 0 else num_layers + 1 + layer


def merge_patches(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Join `factor` x `factor` neighbours of a grid `[B, rows, columns, C]`, row by row, into one vector each:
    `[B, rows / factor * columns / factor, factor * factor * C]`.
    """
    batch, rows, columns, _ = x.shape
    x = x.view(batch, rows // factor, factor, columns // factor, factor, -1).transpose(2, 3)
    return x.reshape(batch, (rows // factor) * (columns // factor), -1)
