"""Fill a model's parameters from safetensors files or with random numbers.

Every parameter lists the slices of checkpoint tensors it consists of (`layers.linear.Part`); a parameter without a list
is the tensor of its own name. Files are memory-mapped and each slice is copied once, from the mapping to its
destination, so a rank reads only its share. A layer that repacks a weight may read it directly from the mapping.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import replace

import torch

from quire.configs.config import Config
from quire.worker.host import huge_pages
from quire.worker.layers.linear import Linear, Part
from quire.worker.layers.views import chain, transposed
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.parallel import Group, use_groups
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.names import TensorNames
from quire.worker.weights.checkpoint import Checkpoint, Placement
from quire.worker.weights.gguf import GgufCheckpoint
from quire.worker.weights.random_weights import DummyWeights

_TRIM_EVERY = 256 << 20  # bytes loaded
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load_weights(
    model: CausalLM,
    spec: ModelSpec,
    folder: str,
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Fill all parameters of `model`, and finalize each linear layer as soon as its parameters are complete, so that
    the next layer can reuse memory that repacking frees. Then call `model.finalize()`.

    `auto` means safetensors. `dummy` needs no files: its random numbers depend only on `seed` and the tensor's name, so
    that ranks agree. `progress` is called with the fraction of bytes loaded, at most about a hundred times.

    Raises:
        ValueError: unknown format, no safetensors in `folder`, or tensors that are missing, superfluous, or of the
        wrong shape or type, by name.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format is {load_format!r}, but must be one of {', '.join(LOAD_FORMATS)}")
    if spec.implementation == "transformers":
        return model.load(folder, load_format, seed, progress)
    with torch.inference_mode(), ExitStack() as stack:
        if load_format == "dummy":
            placements, fill, release = deque(placements_of(model, TensorNames())), DummyWeights(seed).fill, _keep
        else:
            checkpoint = stack.enter_context(_open(folder, spec))
            names = checkpoint.names_of(model)
            placements = deque(placements_of(model, names, checkpoint))
            checkpoint.check(placements, model, spec, names)
            placements = deque(sorted(placements, key=lambda p: checkpoint.position[p.part.name]))
            fill, release = checkpoint.fill, checkpoint.release
        _fill_all(model, placements, fill, release, progress)
        model.finalize()


def check_model(config: Config, spec: ModelSpec | None = None, *, files: bool = True) -> CausalLM:
    """Return the model without memory for its weights; `spec` has what drafts need of it. Raises the ValueError that
    building it and, with `files`, loading its weights would raise. Checks shapes only: reads no weights.
    """
    options, group = config.model, Group()
    spec = spec or read_model_spec(options.model, options.model_impl, images=not options.language_model_only)
    group.size = config.parallel.tensor_parallel_size
    with use_groups(tp=group, ep=group if config.parallel.enable_expert_parallel else None):
        model = build_model(spec, torch.float32, torch.device("meta"))
    if files and config.model.load_format != "dummy":
        check_files(model, spec, options.model)
    return model


def check_files(model: CausalLM, spec: ModelSpec, folder: str) -> None:
    """Raise ValueError unless the headers of the weights in `folder` fit `model`."""
    if spec.implementation == "quire":
        with _open(folder, spec) as checkpoint:
            names = checkpoint.names_of(model)
            checkpoint.check(placements_of(model, names, checkpoint), model, spec, names)


def _open(folder: str, spec: ModelSpec) -> Checkpoint:
    """Return the weights of the model in `folder`: safetensors, or the GGUF file that its config.json names."""
    if (spec.raw.get("quantization_config") or {}).get("quant_method") == "gguf":
        return GgufCheckpoint(folder, spec.raw)
    return Checkpoint(folder)


def placements_of(model: CausalLM, names: TensorNames, checkpoint: Checkpoint | None = None) -> Iterable[Placement]:
    """Yield the slices of all parameters. A parameter that the files may hold in several forms takes the first that
    they do hold.
    """

    def in_file(part: Part) -> Part:
        if any(re.search(pattern, part.name) for pattern in names.transposed):
            part = _transpose_part(part)
        return replace(part, name=names.in_file(part.name))

    def tower_name(part: Part) -> Part:
        return replace(part, name=names.tower_name(part.name))

    for name, parameter in model.named_parameters():  # a shared parameter is listed once
        find = tower_name if name.startswith("vision.") else in_file
        view = getattr(parameter, "view_of_tensor", None)
        parts = getattr(parameter, "parts", None) or [Part(name, tuple(parameter.shape), view=view)]
        parts = list(map(find, parts))
        absent = getattr(parameter, "if_absent", None)
        if absent is not None and checkpoint and parts[0].name not in checkpoint.position:
            parameter.data.fill_(absent)
            continue
        others = getattr(parameter, "other_parts", ()) if checkpoint else ()
        if others and not checkpoint.holds(parts):
            parts = next(filter(checkpoint.holds, (list(map(find, form)) for form in others)), parts)
        yield from (Placement(part, parameter) for part in parts)


def _transpose_part(part: Part) -> Part:
    """Return the same slice of a matrix that the checkpoint holds as `[in, out]`."""
    source = tuple((1 - dim, start, length) for dim, start, length in part.source)
    return replace(part, shape=part.shape[::-1], source=source, view=chain(transposed, part.view))


def _fill_all(
    model: torch.nn.Module,
    placements: deque[Placement],
    fill: Callable[[Placement, bool], bool],
    release: Callable[[torch.Tensor], None],
    progress: Callable[[float], None] | None,
) -> None:
    """Fill all placements. Empties the queue, which would otherwise keep the memory of repacked parameters alive.

    `fill` copies a slice or, if allowed, lends the file's memory to the parameter; it returns whether it did.
    `release` is called with lent memory that is no longer used.
    """
    total = sum(p.target.nbytes for p in placements)
    done, reported, trimmed = 0, 0.0, 0
    layers = _IncompleteLayers(model, placements, release)
    while placements:
        placement = placements.popleft()
        layers.prepare(placement)
        layers.filled(placement, fill(placement, bool(layers.layers_using(placement))))
        done += placement.target.nbytes
        if done - trimmed > _TRIM_EVERY or done == total:
            trimmed = done
            huge_pages.trim()  # memory that quantizing freed
        if progress and (done - reported * total >= total / 100 or done == total):
            reported = done / total
            progress(reported)


class _IncompleteLayers:
    """Finalizes each linear layer of `model` when all slices of its parameters are filled.

    Allocating memory takes longer than copying into it. So the memory of parameters that a finalized layer gives up is
    reused for parameters of the same shape and dtype, and lent memory is copied only if the layer keeps it.
    """

    def __init__(
        self, model: torch.nn.Module, placements: Collection[Placement], release: Callable[[torch.Tensor], None]
    ):
        self._release = release
        # by the id of a parameter, which two layers may share
        self._layers: dict[int, list[Linear]] = defaultdict(list)
        for layer in model.modules():
            if isinstance(layer, Linear):
                for parameter in layer.parameters(recurse=False):
                    self._layers[id(parameter)].append(layer)
        self._missing = Counter(layer for placement in placements for layer in self.layers_using(placement))
        # number of slices of each parameter that has none filled yet
        self._slices = Counter(id(placement.parameter) for placement in placements)
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, int] = {}  # id of a parameter -> its address in a file's mapping

    def layers_using(self, placement: Placement) -> list[Linear]:
        """Return the layers that use this slice."""
        return self._layers.get(id(placement.parameter), [])

    def prepare(self, placement: Placement) -> None:
        """Call this before a slice is filled. A fused parameter, which is never lent, may get reused memory before its
        first slice.
        """
        parameter = placement.parameter
        if self._slices.pop(id(parameter), 0) > 1 and (spare := self._spare[parameter.shape, parameter.dtype]):
            parameter.data = spare.pop()

    def filled(self, placement: Placement, lent: bool) -> None:
        if lent:
            self._lent[id(placement.parameter)] = placement.parameter.data_ptr()
        for layer in self.layers_using(placement):
            self._missing[layer] -= 1
            if not self._missing[layer]:
                self._finalize(layer)

    def _finalize(self, layer: Linear) -> None:
        before = list(layer.parameters(recurse=False))
        layer.finalize()
        kept = {id(parameter) for parameter in layer.parameters(recurse=False)}
        for parameter in before:
            lent = self._lent.get(id(parameter)) == parameter.data_ptr()
            if lent:
                mapped = parameter.data
                if id(parameter) in kept:
                    parameter.data = huge_pages.zeros(*mapped.shape, dtype=mapped.dtype).copy_(mapped)
                self._release(mapped)
            elif id(parameter) not in kept:
                self._spare[parameter.shape, parameter.dtype].append(parameter.data)


def _keep(tensor: torch.Tensor) -> None:
    """Do nothing: random weights lend no memory, so that there is none to release."""
