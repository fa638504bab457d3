"""The linear layers of a model that adapters may have matrices for, by the names of modules in checkpoints.

One of our layers may be several modules of a checkpoint (q, k and v), and holds only this rank's share of them. B is
split like the rows of the weight, A like its columns: the sum over the ranks then includes the adapter's part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from quire.checkpoints.lora_files import LoraFiles, LoraMatrices
from quire.worker.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MatrixLinear,
    Narrow,
    RowParallelLinear,
    narrowed,
)
from quire.worker.layers.lora import LinearLora, LoraWeights, StepLora
from quire.worker.layers.moe import ListedExperts, StackedExperts
from quire.worker.layers.moe_lora import ExpertProduct, ExpertsLora
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

    layer: Linear | ExpertProduct
    out_features: int
    in_features: int
    rows: tuple[Narrow, ...]  # for B
    columns: tuple[Narrow, ...]  # for A
    target: slice  # for the layer's output
    view: View | None = None
    expert: int | None = None  # for a tensor of `num_experts`
    num_experts: int | None = None

    def expert_matrices(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's matrices out of those of all experts in PEFT's order."""
        of_a, of_b = a.unflatten(0, (self.num_experts, -1)), b.unflatten(1, (-1, self.num_experts))
        return of_a[self.expert], of_b[..., self.expert]


class Targets:
    """The targets of a model, found once the weights are loaded; gives every layer its `LinearLora`."""

    def __init__(self, model: nn.Module, step: StepLora):
        self.pieces: dict[tuple[int, str], list[Piece]] = {}
        names = TensorNames(getattr(model, "renames", None))
        self._layers = model.spec.layers
        self.num_layers = model.spec.num_hidden_layers
        self.dtype = model.dtype  # for the adapters' matrices
        self.bytes_per_rank = 0  # without experts
        self.linears: list[Linear] = []
        for path, layer in model.named_modules():
            if isinstance(layer, (ListedExperts, StackedExperts)) and (experts := layer.take_adapters(step)):
                self._add_experts(path, experts, names)
            if not isinstance(layer, Linear) or ".experts." in path:
                continue
            modules, num_parts = set(), 0  # each module has an A of its own
            for name, piece in _pieces(path, layer):
                num_parts += 1
                for candidate in names.modules(name):
                    if match := _IN_LAYER.fullmatch(candidate):
                        self._add((int(match[1]), match[2]), piece)
                        modules.add(name)
            if modules:
                layer.lora = LinearLora(step, len(modules), num_parts)
                self.linears.append(layer)
                self.bytes_per_rank += self.dtype.itemsize * (len(modules) * layer.in_features + layer.out_features)

    def _add_experts(self, path: str, lora: ExpertsLora, names: TensorNames) -> None:
        """Add experts as separate modules, `path`.3.gate_proj, and as tensors of all experts, of the module `path`."""
        for projection, pieces in _expert_pieces(lora).items():
            for candidate in names.modules(f"{path}.#.{projection}"):
                for expert in range(lora.num_experts):
                    if match := _IN_LAYER.fullmatch(candidate.replace("#", str(expert))):
                        self.pieces[int(match[1]), match[2]] = pieces.get(expert, [])  # another rank's: none
        for candidate in names.modules(path):
            if match := _IN_LAYER.fullmatch(candidate):
                for piece in _stacked_pieces(lora):
                    self._add((int(match[1]), match[2]), piece)

    def _add(self, key: tuple[int, str], piece: Piece) -> None:
        pieces = self.pieces.setdefault(key, [])
        if piece not in pieces:
            pieces.append(piece)

    def find(self, module: str) -> list[Piece]:
        """Return the pieces of a module, none if another pipeline stage has it. Raises ValueError if the model has no
        such linear layer.
        """
        match = _IN_LAYER.fullmatch(module)
        if match is None:
            raise ValueError(
                f"the adapter has matrices for {module}; supported are linear layers of the language model's layers, "
                "not the embedding, the output head or an encoder of images"
            )
        layer, name = int(match[1]), match[2].replace(".base_layer", "")
        if (found := self.pieces.get((layer, name))) is not None:
            return found
        if ".experts." in f".{name}.":
            raise ValueError(
                f"the adapter has matrices for {module}, but the model has no such experts, or experts without a gate, "
                "for which adapters are not supported"
            )
        known = sorted({name for _, name in self.pieces if ".experts." not in name})
        if layer < self.num_layers and name in known and not self._has(layer):
            return []
        raise ValueError(
            f"the adapter has matrices for {module}, but the model has no such linear layer; it has layers 0 to "
            f"{self.num_layers - 1} with {', '.join(known[:20])}"
        )

    def pieces_by_linear(self) -> dict[Linear, list[Piece]]:
        """Return the pieces of each linear layer except experts, whatever checkpoints call their modules."""
        found: dict[Linear, dict[int, Piece]] = {layer: {} for layer in self.linears}
        for pieces in self.pieces.values():
            for piece in pieces:
                if piece.layer in found:
                    found[piece.layer].setdefault(piece.target.start, piece)
        return {layer: list(by_start.values()) for layer, by_start in found.items()}

    def expert_pieces(self) -> dict[ExpertProduct, list[Piece]]:
        """Return the pieces of each expert of the first layer that has any."""
        places = [
            (number, piece)
            for (number, _), pieces in self.pieces.items()
            for piece in pieces
            if isinstance(piece.layer, ExpertProduct) and piece.expert is None
        ]
        first, found = min((number for number, _ in places), default=0), {}
        for number, piece in places:
            if number == first:
                found.setdefault(piece.layer, {}).setdefault(piece.target.start, piece)
        return {layer: list(by_start.values()) for layer, by_start in found.items()}

    def num_heads(self, module: str) -> int:
        """Return the heads of a projection of queries or keys, on all ranks."""
        layer = self._layers[int(_IN_LAYER.fullmatch(module)[1])]
        return layer.num_heads if module.endswith("q_proj") else layer.num_kv_heads

    def check(self, lora: LoraFiles, max_rank: int) -> dict[str, list[Piece]]:
        """Return the pieces of every module of an adapter. Raises ValueError if it does not fit the model."""
        if lora.rank > max_rank:
            raise ValueError(f"the adapter has rank {lora.rank}, more than --max-lora-rank {max_rank}")
        return {module: self._fitting(module, matrices) for module, matrices in lora.modules.items()}

    def _fitting(self, module: str, theirs: LoraMatrices) -> list[Piece]:
        """Return which of a module's pieces the matrices are for: the gate and up, or the down projection of all
        experts have other shapes. Raises ValueError if they fit none.
        """
        pieces = self.find(module)
        shape = theirs.out_features, theirs.in_features, theirs.num_experts
        fitting = [piece for piece in pieces if (piece.out_features, piece.in_features, piece.num_experts) == shape]
        if pieces and not fitting:
            ours = sorted({(piece.out_features, piece.in_features) for piece in pieces})
            experts = f"{pieces[0].num_experts} experts of " if pieces[0].num_experts else ""
            raise ValueError(
                f"the adapter's matrices of {module} are for a weight of "
                f"{f'{theirs.num_experts} experts of ' if theirs.num_experts else ''}{shape[0]} x {shape[1]}, but the "
                f"model's is {experts}{' or '.join(f'{out} x {into}' for out, into in ours)}"
            )
        return fitting

    def _has(self, layer: int) -> bool:
        return any(number == layer for number, _ in self.pieces)


def _pieces(path: str, layer: Linear) -> Iterator[tuple[str, Piece]]:
    """Yield (name of the module, piece) of one layer."""
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


def _expert_pieces(lora: ExpertsLora) -> dict[str, dict[int, list[Piece]]]:
    """Return the pieces by projection and expert."""
    share, length = (lora.start, lora.length), lora.length
    gate_up = [
        {i: [Piece(one, lora.size, lora.hidden_size, ((0, *share),), (), span)] for i, one in lora.gate_up.items()}
        for span in (slice(0, length), slice(length, 2 * length))
    ]
    down = {i: [_down_piece(lora, i, None)] for i in lora.down}
    return dict(zip(("gate_proj", "up_proj", "down_proj"), (*gate_up, down)))


def _stacked_pieces(lora: ExpertsLora) -> Iterator[Piece]:
    """Yield pieces of tensors of all experts, with [gate, up] in one, whose rows may alternate."""
    length = lora.length
    for expert, product in lora.gate_up.items():
        for half, view in enumerate((_even_rows, _odd_rows)):
            start = 2 * lora.start if lora.interleaved else half * lora.size + lora.start
            yield Piece(
                product, 2 * lora.size, lora.hidden_size, ((0, start, 2 * length if lora.interleaved else length),), (),
                slice(half * length, (half + 1) * length), view if lora.interleaved else None, expert, lora.num_experts,
            )  # fmt: skip
        yield _down_piece(lora, expert, lora.num_experts)


def _down_piece(lora: ExpertsLora, expert: int, num_experts: int | None) -> Piece:
    columns, target = ((1, lora.start, lora.length),), slice(0, lora.hidden_size)
    place = None if num_experts is None else expert
    sizes = lora.hidden_size, lora.size
    return Piece(lora.down[expert], *sizes, (), columns, target, None, place, num_experts)


def _even_rows(b: torch.Tensor) -> torch.Tensor:
    return b[::2]


def _odd_rows(b: torch.Tensor) -> torch.Tensor:
    return b[1::2]


def layer_weights(pieces: list[tuple[Piece, torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> LoraWeights:
    """Return the matrices of one layer, of `dtype`, from (piece, A, B) of its modules; pieces of one module
    share an A.
    """
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
