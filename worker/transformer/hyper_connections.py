"""Hyper-connections (https://arxiv.org/abs/2409.19606) with mixing matrices whose rows and columns sum up to 1
(https://arxiv.org/abs/2512.24880): several residual streams, a weighted sum of which is the input of each half of a
layer.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, RowProduct, WeightFormat, empty_parameter
from quire.worker.layers.rowwise import rsqrt, sigmoid
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.blocks import DecoderLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import Decoder


class StreamProduct(RowProduct):
    """Maps streams `[T, S, H]` to the product of their norm with the tensor `prefix`_fn, float32 `[T, rows]`."""

    def __init__(self, spec: ModelSpec, prefix: str, rows: int):
        super().__init__(num_streams(spec) * spec.hidden_size, rows, prefix, torch.float32)
        self.weight.parts, self.eps = [Part(f"{prefix}_fn", tuple(self.weight.shape))], spec.norm_eps

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        x = streams.float()
        # stream by stream: torch splits the sum over a single long row between its threads
        scale = rsqrt(x.square().mean(-1).mean(-1, keepdim=True) + self.eps)
        return self.multiply(x.flatten(1) * scale, self.weight)


class HyperConnection(nn.Module):
    """The weights with which one half of a layer reads streams `[T, S, H]` and writes them, all from their norm."""

    def __init__(self, spec: ModelSpec, prefix: str):
        super().__init__()
        self.streams = num_streams(spec)
        self.eps, self.rounds = spec.raw.get("hc_eps", 1e-6), spec.raw.get("hc_sinkhorn_iters", 20)
        rows = (2 + self.streams) * self.streams
        self.fn = StreamProduct(spec, prefix, rows)
        for name, shape in {"base": (rows,), "scale": (3,)}.items():
            part = Part(f"{prefix}_{name}", shape)
            self.register_parameter(name, empty_parameter(*shape, parts=[part], dtype=torch.float32))

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (the half's input `[T, H]`, weights of its result per stream `[T, S]`, and of old streams per new one
        `[T, S, S]`).
        """
        size, logits = self.streams, self.fn(streams)
        sizes = [size, size, size * size]
        reads, writes, mixes = (
            part * scale + base
            for part, scale, base in zip(logits.split(sizes, -1), self.scale, self.base.split(sizes))
        )
        mixes = mixes.unflatten(-1, (size, size)).softmax(-1) + self.eps
        mixes = mixes / (mixes.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.rounds - 1):
            mixes = mixes / (mixes.sum(-1, keepdim=True) + self.eps)
            mixes = mixes / (mixes.sum(-2, keepdim=True) + self.eps)
        weights = sigmoid(reads) + self.eps
        x = (weights[..., None] * streams).sum(1).to(streams.dtype)
        return x, 2 * sigmoid(writes), mixes.transpose(-1, -2)


def write(streams: torch.Tensor, x: torch.Tensor, writes: torch.Tensor, mixes: torch.Tensor) -> torch.Tensor:
    """Return the streams `[T, S, H]` after a half of a layer, whose result is x `[T, H]`."""
    dtype = streams.dtype
    return writes.to(dtype)[..., None] * x[:, None] + mixes.to(dtype) @ streams


class HyperLayer(DecoderLayer):
    """A layer on all streams x `[T, S, H]`; the residual is always None."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.attn_hc, self.ffn_hc = (HyperConnection(spec, f"{prefix}.hc_{half}") for half in ("attn", "ffn"))

    def forward(self, x: torch.Tensor, residual: None, call: LayerCall) -> tuple[torch.Tensor, None]:
        read, *weights = self.attn_hc(x)
        attended = self.self_attn(self.input_layernorm(read), call)
        streams = write(call.needed(x), attended, *map(call.needed, weights))
        read, *weights = self.ffn_hc(streams)
        return write(streams, self.feed_forward(self.post_attention_layernorm(read), call), *weights), None

    def feed_forward(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return the MLP's output for x, the norm of its input."""
        return self.mlp(x)


class HyperDecoder(Decoder):
    """A decoder whose streams all begin as the embeddings; the last norm reads their mean, or another result of
    `merge`.
    """

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return HyperLayer

    @property
    def received_width(self) -> int:
        return num_streams(self.spec) * self.spec.hidden_size

    def forward(self, call: StageCall) -> torch.Tensor:
        size, hidden = num_streams(self.spec), self.spec.hidden_size
        if self.first:
            streams = self.embed(call)[:, None].repeat(1, size, 1)
        else:
            streams = call.hidden.unflatten(1, (size, hidden))
        for layer, layer_call in self.layer_calls(call, self.layer_inputs(call)):
            streams, _ = layer(streams, None, layer_call)
        return self.norm(self.merge(streams)) if self.last else streams.flatten(1)

    def layer_inputs(self, call: StageCall) -> torch.Tensor | None:
        """Return the layers' own inputs, see `layer_calls`."""
        return None

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the input `[T, H]` of the last norm."""
        return streams.mean(1)


def num_streams(spec: ModelSpec) -> int:
    return spec.raw.get("hc_mult", spec.raw.get("hc_count", 4))
