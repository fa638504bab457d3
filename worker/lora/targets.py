"""The linear layers of a model that adapters may have matrices for, by the names of modules in checkpoints.

A layer of ours may be several modules of a checkpoint (q, k and v), and holds only this rank's share of them. B is
split like the rows of the weight, A like its columns: the sum over the ranks then includes the adapter's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from quire.checkpoints.lora import LoraFiles
from quire.worker.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MatrixLinear,
    Narrow,
    RowParallelLinear,
    narrowed,
)
from quire.worker.layers.lora import LinearLora, LoraWeights, StepLora
from quire.worker.layers.views import View
from quire.worker.transformer.names import TensorNames

# a module within a layer of the language model: number of the layer, name below it
_IN_LAYER = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|decoder|backbone|base_model|gpt_neox)\.)*"
    r"(?:layers|h|blocks|block)\.(\d+)\.(.+)"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a layer that are rows of a checkpoint's module `[out_features, in_features]`."""

    layer: Linear
    out_features: int
    in_features: int
    rows: tuple[Narrow, ...]  # of B
    columns: tuple[Narrow, ...]  # of A
    target: slice  # of the layer's output
    view: View | None = None


class Targets:
    """Found once, when the weights are loaded; gives every layer its `LinearLora`."""

    def __init__(self, model: nn.Module, step: StepLora):
        self.pieces: dict[tuple[int, str], list[Piece]] = {}
        names = TensorNames(getattr(model, "renames", None))
        self.num_layers = model.spec.num_hidden_layers
        self.dtype = model.dtype  # of the adapters' matrices
        self.bytes_per_rank = 0
        for path, layer in model.named_modules():
            if not isinstance(layer, Linear) or ".experts." in path:
                continue
            widths = 0
            for name, piece in _pieces(path, layer):
                for candidate in names.modules(name):
                    if match := _IN_LAYER.fullmatch(candidate):
                        self._add((int(match[1]), match[2]), piece)
                        widths = layer.in_features + layer.out_features
            if widths:
                layer.lora = LinearLora(step)
                self.bytes_per_rank += self.dtype.itemsize * widths

    def _add(self, key: tuple[int, str], piece: Piece) -> None:
        pieces = self.pieces.setdefault(key, [])
        if piece not in pieces:
            pieces.append(piece)

    def find(self, module: str) -> list[Piece]:
        """The pieces of a module, none if another pipeline stage has it. Raises ValueError if the model has no such
        linear layer.
        """
        match = _IN_LAYER.fullmatch(module)
        if match is None:
            raise ValueError(
                f"the adapter has matrices for {module}; supported are linear layers of the language model's layers, "
                "not the embedding, the output head or an encoder of images"
            )
        layer, name = int(match[1]), match[2]
        if ".experts." in f".{name}.":
            raise ValueError(f"the adapter has matrices for {module}; adapters of experts are not supported")
        if found := self.pieces.get((layer, name)):
            return found
        known = sorted({name for _, name in self.pieces})
        if layer < self.num_layers and name in known and not self._has(layer):
            return []
        raise ValueError(
            f"the adapter has matrices for {module}, but the model has no such linear layer; it has layers 0 to "
            f"{self.num_layers - 1} with {', '.join(known[:20])}"
        )

    def check(self, lora: LoraFiles, max_rank: int) -> dict[str, list[Piece]]:
        """The pieces of every module of an adapter. Raises ValueError if it does not fit the model."""
        if lora.rank > max_rank:
            raise ValueError(f"the adapter has rank {lora.rank}, more than --max-lora-rank {max_rank}")
        found = {module: self.find(module) for module in lora.modules}
        for module, pieces in found.items():
            theirs = lora.modules[module]
            for piece in pieces:
                if (piece.out_features, piece.in_features) != (theirs.out_features, theirs.in_features):
                    raise ValueError(
                        f"the adapter's matrices of {module} are for a weight of {theirs.out_features} x "
                        f"{theirs.in_features}, but the model's is {piece.out_features} x {piece.in_features}"
                    )
        return found

    def _has(self, layer: int) -> bool:
        return any(number == layer for number, _ in self.pieces)


def _pieces(path: str, layer: Linear) -> Iterator[tuple[str, Piece]]:
    """(name of the module, piece) of one layer."""
    if isinstance(layer.method, MatrixLinear) or not layer.takes_adapters:
        return
    if isinstance(layer, ColumnParallelLinear):
        for one in layer.shards:
            rows, target = ((0, one.start, one.length),), slice(one.target, one.target + one.length)
            yield one.prefix, Piece(layer, one.full, layer.in_features, rows, (), target, one.view)
    elif isinstance(layer, RowParallelLinear):
        columns = ((1, layer.group.rank * layer.in_features, layer.in_features),)
        everything = slice(0, layer.out_features)
        yield layer.prefix, Piece(layer, layer.out_features, layer.full_in_features, (), columns, everything)
    else:  # a layer of transformers, in its place
        everything = slice(0, layer.out_features)
        yield path, Piece(layer, layer.out_features, layer.in_features, (), (), everything)


def layer_weights(pieces: list[tuple[Piece, torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> LoraWeights:
    """The matrices of one layer, of `dtype`, from (piece, A, B) of its modules; pieces of one module share an A."""
    stacked: dict[int, tuple[slice, torch.Tensor]] = {}
    parts, start = [], 0
    for piece, a, b in pieces:
        if id(a) not in stacked:
            stacked[id(a)] = slice(start, start + len(a)), narrowed(a, piece.columns)
            start += len(a)
        rows = narrowed(b, piece.rows)
        rows = (piece.view(rows) if piece.view else rows).to(dtype).contiguous()
        parts.append((stacked[id(a)][0], piece.target, rows))
    return LoraWeights(torch.cat([a for _, a in stacked.values()]).to(dtype).contiguous(), parts)
