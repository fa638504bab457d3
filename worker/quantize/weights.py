"""The tensors of a checkpoint that are quantized: the projections of attention, MLPs and experts. Output heads,
embeddings, routers and encoders of images stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from quire.worker.layers.linear import MATRIX, Linear, LinearMethod, Part, PlainLinear, WeightFormat, narrowed
from quire.worker.layers.moe import ListedExperts
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.moe import RouterLinear
from quire.worker.transformer.names import TensorNames
from quire.worker.weights.checkpoint import Checkpoint
from quire.worker.weights.loader import placements_of


class Plain(WeightFormat):
    """Weights as in a floating-point checkpoint, those of experts one by one."""

    def linear(self, prefix: str) -> LinearMethod:
        return PlainLinear()  # not PLAIN, whose experts may be stacked


_BLOCKS = (".self_attn.", ".mlp.")  # modules of the decoder whose linear layers are quantized


@dataclass(slots=True)
class Weight:
    """A weight `[out, in]` as the output names it. `source` is the slice of the checkpoint's tensor that holds it (of
    all experts, or it alone); `places` are the layers' parameters that it goes to.
    """

    name: str  # e.g. "model.layers.0.mlp.experts.3.up_proj"
    source: Part
    places: list[tuple[Linear, Part]]

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        return self.source.take(checkpoint.tensor(self.source.name))

    def replace(self, value: torch.Tensor) -> None:
        """Give the layers the weight `value` instead."""
        for layer, part in self.places:
            narrowed(layer.weight.data, part.target).copy_(part.take(value))

    @property
    def layer(self) -> Linear:
        """Return a layer whose inputs the weight multiplies."""
        return self.places[0][0]


def find_weights(model: CausalLM, names: TensorNames, checkpoint: Checkpoint) -> dict[str, Weight]:
    """Return the weights to quantize by name, in the order of the model.

    Raises:
        ValueError: the checkpoint's layout has no counterpart in compressed-tensors.
    """
    refuse_layouts(model)
    stored = defaultdict(list)
    for placement in placements_of(model, names, checkpoint):
        stored[id(placement.parameter)].append(placement.part)
    found: dict[str, Weight] = {}
    for path, layer in model.named_modules():
        if not _is_projection(path, layer):
            continue
        for part, source in zip(layer.weight_parts(), stored[id(layer.weight)], strict=True):
            name = names.in_file(part.name)
            whole = source.name == name
            # in one tensor, this part's rows; in all experts' tensor, a weight of its own
            place = part if whole else Part(name, part.shape, (), part.target)
            weight = found.setdefault(
                name, Weight(name.removesuffix(".weight"), Part(name, part.shape) if whole else source, [])
            )
            weight.places.append((layer, replace(place, name=name)))
    return {weight.name: weight for weight in found.values()}


def refuse_layouts(model: CausalLM) -> None:
    kind = model.spec.architecture
    if model.transposed:
        raise ValueError(f"{kind} checkpoints hold matrices as [in, out], which compressed-tensors has no form for")
    if any(module.biased for module in model.modules() if isinstance(module, ListedExperts)):
        raise ValueError(f"the experts of {kind} have biases, which compressed-tensors has no form for")


def _is_projection(path: str, layer: torch.nn.Module) -> bool:
    if not isinstance(layer, Linear) or isinstance(layer, RouterLinear) or layer.method is MATRIX:
        return False
    return any(block in path for block in _BLOCKS) and not path.startswith("vision.")
