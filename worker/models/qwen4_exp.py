"""Qwen4-Exp: Qwen3.5's layers on several residual streams, with embeddings of n-grams in front of some (PLE).

An index chooses blocks of keys by the means of the index's keys (QSA, `mixers/block_attention.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from quire.worker.layers.linear import PLAIN_WEIGHTS, Part, WeightFormat, empty_parameter, whole
from quire.worker.layers.moe import give_other_parts
from quire.worker.layers.norm import OffsetRMSNorm, rms_norm
from quire.worker.layers.rowwise import sigmoid, silu
from quire.worker.layers.state import RecurrentState
from quire.worker.layers.states.ngrams import ngram_rows
from quire.worker.layers.states.short_conv import spaced_conv
from quire.worker.models.qwen3_next import Qwen35, Qwen35Moe
from quire.worker.models.qwen_vl import AxialRope
from quire.worker.parallel import Exchange, tp
from quire.worker.spec.cache import IndexSizes
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.spec.ngrams import NgramSpec, multipliers, table_sizes
from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.blocks import DecoderLayer
from quire.worker.transformer.calls import LayerCall, StageCall
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.hyper_connections import HyperDecoder, num_streams
from quire.worker.transformer.mixers.base import Convolution
from quire.worker.transformer.reader import FULL, STATE

INDEX_KEYS = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_NGRAMS = (
    "ngram_size",
    "heads_per_ngram",
    "ple_embed_dim",
    "ple_conv_kernel_size",
    "ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by",
    "split_ngram_parts",
)


class StreamNorm(OffsetRMSNorm):
    """Normalises each of the streams `[T, S, H]`, with weights of its own."""

    def __init__(self, spec: ModelSpec):
        super().__init__(num_streams(spec) * spec.hidden_size, spec.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight.view(x.shape[1:]), self.eps)


class GatedResidual(nn.Module):
    """Reads streams `[T, S, H]`: the mean of their norms, each entry with a weight that depends on all of them. If it
    `writes`, it also returns a weight per stream for what is added to them, `[T, S]`.
    """

    def __init__(self, spec: ModelSpec, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS, writes: bool = True):
        super().__init__()
        self.streams, rank = num_streams(spec), spec.raw.get("hc_lowrank", 320)
        width = self.streams * spec.hidden_size
        self.hc_norm = StreamNorm(spec)
        self.down = whole(width, rank, f"{prefix}.input_mix_weight_down", weights)
        self.up = whole(rank, width, f"{prefix}.input_mix_weight_up", weights)
        self.inject = whole(width, self.streams, f"{prefix}.block_inject_weight", weights) if writes else None

    def forward(self, streams: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        normed = self.hc_norm(streams)
        flat = normed.flatten(1)
        inner = silu(self.down(flat).float() / self.streams).to(flat.dtype)
        read = (sigmoid(self.up(inner).float()).view_as(normed) * normed).mean(1).to(streams.dtype)
        if self.inject is None:
            return read
        return read, 2 * sigmoid(self.inject(flat).float() / self.streams)


def write(streams: torch.Tensor, x: torch.Tensor, writes: torch.Tensor) -> torch.Tensor:
    """Return the streams after a half of a layer, whose result is x `[T, H]`."""
    return streams + writes.to(x.dtype)[..., None] * x[:, None]


class NgramTable(nn.Module):
    """The embeddings of n-grams, whose rows are divided among the ranks: maps rows `[T, heads]` to `[T, size]`. Files
    hold the rows in several tensors, or in one.
    """

    def __init__(self, ngrams: NgramSpec, prefix: str):
        super().__init__()
        self.group = tp()
        total, width = ngrams.total, ngrams.embed_dim // len(ngrams.rows)
        self.num_rows = -(-total // self.group.size)
        self.first = self.group.rank * self.num_rows
        each = -(-total // ngrams.num_files)
        parts = [
            self._part(f"{prefix}.shard_{i}.weight", start, min(each, total - start), width)
            for i, start in enumerate(range(0, total, each))
        ]
        self.weight = empty_parameter(self.num_rows, width, parts=[part for part in parts if part])
        give_other_parts(self.weight, [[part] if (part := self._part(f"{prefix}.weight", 0, total, width)) else []])

    def _part(self, name: str, start: int, length: int, width: int) -> Part | None:
        """Return this rank's part of a tensor with rows `start : start + length`, None without."""
        begin, end = max(start, self.first), min(start + length, self.first + self.num_rows)
        if begin >= end:
            return None
        source, target = (0, begin - start, end - begin), (0, begin - self.first, end - begin)
        return Part(name, (length, width), (source,), (target,))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return F.embedding(rows, self.weight).flatten(1)
        rows = rows - self.first
        mine = (rows >= 0) & (rows < self.num_rows)
        return self.group.all_reduce((F.embedding(rows * mine, self.weight) * mine[..., None]).flatten(1))


class NgramEmbedding(nn.Module):
    """Maps streams `[T, S, H]` to what embeddings of the last tokens add to them: a value, with a gate per stream, and
    its convolution.
    """

    def __init__(self, spec: ModelSpec, ngrams: NgramSpec, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        self.ngrams, self.streams = ngrams, num_streams(spec)
        width = self.streams * spec.hidden_size
        self.table = NgramTable(ngrams, f"{prefix}.ple_embedding.ngram_embedding")
        self.key_proj = whole(ngrams.embed_dim, width, f"{prefix}.key_proj", weights)
        self.value_proj = whole(ngrams.embed_dim, spec.hidden_size, f"{prefix}.value_proj", weights)
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorm(spec) for _ in range(3))
        self.conv1d = Convolution([(f"{prefix}.conv1d", width, [(0, width)])], ngrams.width, False)

    def forward(self, streams: torch.Tensor, call: LayerCall, state: RecurrentState) -> torch.Tensor:
        """`inputs` of the call are the tokens' ids `[T]`; the last of the layer's states are `NgramSpec.shapes`."""
        inputs, texts = state.pages[-2:]
        step = state.step(call.attn)
        embedded = self.table(ngram_rows(call.inputs, self.ngrams, texts, step))
        key = self.norm_key(self.key_proj(embedded).view_as(streams)).float()
        gate = (key * self.norm_query(streams).float()).sum(-1, keepdim=True) * streams.shape[-1] ** -0.5
        gate = sigmoid(gate.abs().clamp(min=1e-6).sqrt() * gate.sign()).to(streams.dtype)
        value = gate * self.value_proj(embedded)[:, None]
        conv = spaced_conv(self.norm_conv(value).flatten(1), self.conv1d.weight, inputs, step, self.ngrams.size)
        return value + silu(conv).view_as(value).to(value.dtype)


class Qwen4Layer(DecoderLayer):
    """A layer on all streams x `[T, S, H]`; the residual is always None. `inputs` of its call are the tokens' ids."""

    norm_names: ClassVar = ()
    feeds: ClassVar = ()

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.attn_hyper_connection, self.mlp_hyper_connection = (
            GatedResidual(spec, f"{prefix}.{half}_hyper_connection", weights) for half in ("attn", "mlp")
        )
        ngrams = spec.layers[layer].ngrams
        self.ple = NgramEmbedding(spec, ngrams, f"{prefix}.ple", weights) if ngrams else None

    def forward(self, x: torch.Tensor, residual: None, call: LayerCall) -> tuple[torch.Tensor, None]:
        if self.ple is not None:
            x = x + self.ple(x, call, self.self_attn.state)
        read, writes = self.attn_hyper_connection(x)
        x = write(call.needed(x), self.self_attn(read, call), call.needed(writes))
        read, writes = self.mlp_hyper_connection(x)
        return write(x, self.mlp(read), writes), None

    def exchanges(self, num_tokens: int, num_needed: int) -> list[Exchange]:
        first = [] if self.ple is None else [((num_tokens, self.ple.ngrams.embed_dim), None)]
        return [*first, *super().exchanges(num_tokens, num_needed)]


class Qwen4Decoder(HyperDecoder):
    """The streams are read once more in the place of the last norm."""

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        if self.last:
            self.norm = GatedResidual(spec, "model.norm", weights, writes=False)

    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return Qwen4Layer

    def layer_inputs(self, call: StageCall) -> torch.Tensor:
        return call.input_ids[:, None].expand(-1, len(self.layers))

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        return streams


class Qwen4Exp(Qwen35Moe):
    config_defaults = Qwen35Moe.config_defaults | {
        "model_type": "qwen4_exp_text",
        "partial_rotary_factor": 1.0,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_layer_ids": None,
        "ple_embed_dim": None,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 512,
        "seed": 1234,
        "indexer_n_heads": None,
        "indexer_kv_heads": None,
        "indexer_head_dim": None,
        "indexer_budget": None,
        "indexer_compress_ratio": None,
        "output_gate_type": None,
        "eos_token_id": None,
    }
    facts = Qwen35.facts
    state_kinds = {STATE: STATE, "indexed_attention": FULL}
    renames = {
        "model.norm": "model.hyper_connection_mixer",
        "indexer.q_norm": "indexer.q_layernorm",
        "indexer.k_norm": "indexer.k_layernorm",
    }
    # other ranks' rows, and numbers that follow from config.json
    ignored = (r"\.ple_embedding\.ngram_embedding\.", r"\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)$")

    @classmethod
    def mtp_layer(cls, spec: ModelSpec) -> LayerSpec | None:
        """Return None: no reference has the heads."""
        return None

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["ple_embed_dim"] = values["ple_embed_dim"] or values["hidden_size"]
        values["ple_layer_ids"] = sorted(set(values["ple_layer_ids"] or ()))
        for key in ("hc_count", "hc_lowrank", *INDEX_KEYS, *(_NGRAMS if values["ple_layer_ids"] else ())):
            if not isinstance(values[key], int) or values[key] < 1:
                raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
        if values["indexer_kv_heads"] != 1:
            raise ValueError(f"indexer_kv_heads must be 1, not {values['indexer_kv_heads']}")
        budget, ratio = values["indexer_budget"], values["indexer_compress_ratio"]
        if budget % ratio:
            raise ValueError(f"indexer_budget {budget} is not a multiple of indexer_compress_ratio {ratio}")
        gate = values["output_gate_type"] or values["hidden_act"]
        if gate not in ("sigmoid", "silu"):
            raise ValueError(f"output_gate_type must be sigmoid or silu, not {gate!r}")
        values["output_gate_type"] = gate

    @classmethod
    def layer_specs(
        cls, values: dict[str, Any], raw: dict[str, Any], ropes: dict[str, RopeSpec]
    ) -> tuple[LayerSpec, ...]:
        rope, layers = ropes["default"], super().layer_specs(values, raw, ropes)
        if rope.rotary_dim > values["indexer_head_dim"]:
            raise ValueError(
                f"indexer_head_dim {values['indexer_head_dim']} must be at least {rope.rotary_dim}, the number of "
                "entries of a head that are rotated"
            )
        sizes = IndexSizes(
            values["indexer_budget"],
            values["indexer_n_heads"],
            values["indexer_head_dim"],
            block=values["indexer_compress_ratio"],
            means=True,
            angles=rope.rotary_dim if rope.axes else 0,
        )
        return tuple(
            replace(layer, mixer="block_attention", index=sizes) if layer.attends else layer for layer in layers
        )

    @classmethod
    def layer(cls, values: dict[str, Any], index: int, kind: str, layer: LayerSpec) -> LayerSpec:
        layer, ids = super().layer(values, index, kind, layer), values["ple_layer_ids"]
        if index + 1 in ids and kind != STATE:
            raise ValueError(f"ple_layer_ids: layer {index + 1} has attention, and only linear_attention has a state")
        if kind != STATE:
            return layer
        state = replace(layer.state, gate=values["output_gate_type"])
        if index + 1 not in ids:
            return replace(layer, state=state)
        ngrams = _ngrams(values, ids.index(index + 1))
        return replace(layer, ngrams=ngrams, state=replace(state, others=ngrams.shapes(values["hidden_size"])))

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Decoder:
        return Qwen4Decoder(spec, max_model_len, weights)


class Qwen4ExpVL(AxialRope, Qwen4Exp):
    default_section, interleaved_axes = (11, 11, 10), True


def _ngrams(values: dict[str, Any], place: int) -> NgramSpec:
    """Return the embeddings of n-grams of layer number `place` among those that have them. Raises ValueError naming the
    key.
    """
    size, heads, embed_dim = values["ngram_size"], values["heads_per_ngram"], values["ple_embed_dim"]
    number, eos = (size - 1) * heads, values["eos_token_id"]
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise ValueError("eos_token_id must be given with ple_layer_ids")
    if not number or embed_dim % number:
        raise ValueError(f"ple_embed_dim {embed_dim} is not a multiple of {number}, (ngram_size - 1) * heads_per_ngram")
    rows = table_sizes(values["ngram_vocab_size_base"], place * number, number)
    divisor = values["make_ngram_vocab_size_divisible_by"]
    return NgramSpec(
        rows,
        multipliers(values["vocab_size"], size, place, values["seed"]),
        -(-sum(rows) // divisor) * divisor,
        embed_dim,
        values["ple_conv_kernel_size"],
        values["hc_count"],
        eos,
        values["split_ngram_parts"],
    )
