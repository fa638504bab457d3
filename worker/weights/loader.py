"""Fill a model's parameters from safetensors files or with random numbers.

Every parameter lists the slices of checkpoint tensors it consists of (`layers.linear.Part`); a parameter without a list
is the tensor of its own name. Files are memory-mapped and each slice is copied once, from the mapping to its
destination, so a rank reads only its share. A layer that repacks a weight may read it directly from the mapping.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open

from quire.checkpoints.files import damaged_weights
from quire.checkpoints.safetensors import INDEX, SINGLE, read_index, weight_names
from quire.configs.config import Config
from quire.worker.layers.linear import ANY_LENGTH, Linear, Part, narrowed
from quire.worker.layers.quantization.kv_scales import is_scale
from quire.worker.layers.views import chain, transposed
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.parallel import Group, use_groups
from quire.worker.platforms import huge_pages
from quire.worker.transformer.config import ModelSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.names import TensorNames

_TRIM_EVERY = 256 << 20  # bytes loaded
LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, slots=True)
class Placement:
    """A slice to copy, and the parameter it belongs to."""

    part: Part
    parameter: torch.nn.Parameter

    @property
    def target(self) -> torch.Tensor:
        """The destination inside the parameter."""
        return narrowed(self.parameter.data, self.part.target)


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


def check_model(config: Config, *, files: bool = True) -> None:
    """Raise the ValueError that building the model and, with `files`, loading its weights would raise. Checks shapes
    only: allocates and reads no weights.
    """
    options, group = config.model, Group()
    spec = read_model_spec(options.model, options.model_impl, images=not options.language_model_only)
    group.size = config.parallel.tensor_parallel_size
    with use_groups(tp=group, ep=group if config.parallel.enable_expert_parallel else None):
        model = build_model(spec, torch.float32, torch.device("meta"))
    if files and spec.implementation == "quire" and config.model.load_format != "dummy":
        with _open(config.model.model, spec) as checkpoint:
            names = checkpoint.names_of(model)
            checkpoint.check(placements_of(model, names, checkpoint), model, spec, names)


def _open(folder: str, spec: ModelSpec) -> Checkpoint:
    """The weights of the model in `folder`: safetensors, or the GGUF file that its config.json names."""
    if (spec.raw.get("quantization_config") or {}).get("quant_method") == "gguf":
        from quire.worker.weights.gguf import GgufCheckpoint  # which is a Checkpoint of this module

        return GgufCheckpoint(folder, spec.raw)
    return Checkpoint(folder)


def placements_of(model: CausalLM, names: TensorNames, checkpoint: Checkpoint | None = None) -> Iterable[Placement]:
    """The slices of all parameters. A parameter that the files may hold in several forms takes the first that they do
    hold.
    """

    def in_file(part: Part) -> Part:
        if any(re.search(pattern, part.name) for pattern in names.transposed):
            part = _of_transposed(part)
        return replace(part, name=names.in_file(part.name))

    def of_tower(part: Part) -> Part:
        return replace(part, name=names.of_tower(part.name))

    for name, parameter in model.named_parameters():  # a shared parameter is listed once
        find = of_tower if name.startswith("vision.") else in_file
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


def _of_transposed(part: Part) -> Part:
    """The same slice of a matrix that the checkpoint holds as `[in, out]`."""
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
        layers.filled(placement, fill(placement, bool(layers.of(placement))))
        done += placement.target.nbytes
        if done - trimmed > _TRIM_EVERY or done == total:
            trimmed = done
            huge_pages.trim()  # of what quantizing freed
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
        self._missing = Counter(layer for placement in placements for layer in self.of(placement))
        # number of slices of each parameter that has none filled yet
        self._slices = Counter(id(placement.parameter) for placement in placements)
        self._spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, int] = {}  # id of a parameter -> its address in a file's mapping

    def of(self, placement: Placement) -> list[Linear]:
        """The layers that use this slice."""
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
        for layer in self.of(placement):
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


class Checkpoint:
    """The safetensors files of a folder: those listed in model.safetensors.index.json, or model.safetensors.

    A context manager; the files are open inside it.
    """

    is_mapped: ClassVar[bool] = True  # whether what the files return are views of their mappings, and read only once

    def __init__(self, folder: str):
        self.folder = folder
        self._stack = ExitStack()
        self._file_of: dict[str, safe_open] = {}  # tensor name -> open file
        self.position: dict[str, int] = {}  # tensor name -> position in the order of the files
        self._views: set[int] = set()  # addresses of tensors in the mappings of the files

    def __enter__(self) -> Checkpoint:
        with ExitStack() as opened:
            found: dict[str, list[tuple[Path, safe_open]]] = {}
            for path in _weight_files(Path(self.folder)):
                try:
                    file = opened.enter_context(safe_open(path, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise ValueError(damaged_weights(path, error)) from error
                for name in file.offset_keys():
                    found.setdefault(name, []).append((path, file))
            for name, places in found.items():
                self._file_of[name] = self._chosen(name, places)
                self.position[name] = len(self.position)
            self._stack = opened.pop_all()
        return self

    def _chosen(self, name: str, places: list[tuple[Path, safe_open]]) -> safe_open:
        """The file of a tensor: of several with that name, the one in the index."""
        if len(places) == 1:
            return places[0][1]
        folder = Path(self.folder)
        declared = (read_index(folder) or {}).get(name)
        for path, file in places:
            if declared is not None and path == folder / declared:
                return file
        files = ", ".join(path.name for path, _ in places)
        raise ValueError(f"the tensor {name} is in several files of {self.folder}: {files}; remove all but one")

    def __exit__(self, *exc: object) -> None:
        self._file_of.clear()
        self._stack.close()

    def names_of(self, model: CausalLM) -> TensorNames:
        """The names that the model's tensors have in these files."""
        return model.tensor_names(self.position)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`: a view of the file's mapping, which is not read yet."""
        return self._file_of[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def holds(self, parts: Iterable[Part]) -> bool:
        """Whether the files have the tensors of `parts`, in their shapes."""
        return all(part.name in self._file_of and self.shape(part.name) == part.shape for part in parts)

    def check(
        self, placements: Iterable[Placement], model: CausalLM, spec: ModelSpec, tensor_names: TensorNames
    ) -> None:
        """Raise ValueError naming every tensor that is missing, superfluous, or of an unexpected shape or type."""
        parts = {p.part.name: p.part for p in placements}
        missing = [name for name in parts if name not in self._file_of]
        superfluous = [
            name
            for name in self._file_of
            if name not in parts
            and not tensor_names.is_ignored(name)
            and not is_scale(name)  # `cache/storage.py` decides whether it is used
            and not model.has_elsewhere(name, tensor_names)
            and not model.weight_format.ignores(name, lambda name=name: self._file_of[name].get_tensor(name))
        ]
        if spec.tie_word_embeddings:  # the head is a copy of the embedding
            superfluous = [name for name in superfluous if name != tensor_names.in_file("lm_head.weight")]
        misshapen = []
        for name in parts.keys() & self._file_of.keys():
            found, part = self._file_of[name].get_slice(name), parts[name]
            if not _same_shape(found.get_shape(), part.shape):
                misshapen.append(f"{name} is {list(found.get_shape())}, expected {list(part.shape)}")
            elif found.get_dtype() not in part.types:
                misshapen.append(f"{name} is of type {found.get_dtype()}, expected one of {', '.join(part.types)}")
        problems = [
            f"{what}: {_some(names)}"
            for what, names in (("missing", missing), ("superfluous", superfluous), ("wrong shape or type", misshapen))
            if names
        ]
        if problems:
            hint = ". --language-model-only leaves out the encoder of images" if spec.vision and missing else ""
            raise ValueError(
                f"the weights in {self.folder} do not fit {spec.architecture}; {'; '.join(problems)}{hint}"
            )

    def fill(self, placement: Placement, may_lend: bool) -> bool:
        """Copy one slice and return False or, if a parameter is a whole tensor, let it use the mapping itself and
        return True.
        """
        part, parameter = placement.part, placement.parameter
        in_file = tensor = self._file_of[part.name].get_tensor(part.name)  # a view of the mapping, not read yet
        if self.is_mapped:
            self._views.add(tensor.untyped_storage().data_ptr())
        if tensor.dtype == torch.float8_e8m0fnu and parameter.dtype == torch.uint8:
            tensor = tensor.view(torch.uint8)
        if ANY_LENGTH in part.shape:
            parameter.data = tensor.to(parameter.device, copy=True)
            return False
        tensor = part.of(tensor if tensor.shape == part.shape else tensor.reshape(part.shape))
        if (
            lend := may_lend
            and (tensor.shape, tensor.dtype, tensor.device) == (parameter.shape, parameter.dtype, parameter.device)
            and tensor.is_contiguous()
        ):
            parameter.data = tensor
        else:
            placement.target.copy_(tensor)
            self.release(in_file)
        return lend

    def release(self, tensor: torch.Tensor) -> None:
        """Give back the memory of a tensor that was copied, if it is a view of a file's mapping: all its pages that
        were read stay resident otherwise.
        """
        if tensor.untyped_storage().data_ptr() in self._views:
            huge_pages.drop_mapped(tensor)


def _same_shape(found: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether the shapes agree but for dimensions of one entry, which writers of scales add and leave out."""
    if ANY_LENGTH in wanted:
        return len(found) == len(wanted)
    return [n for n in found if n != 1] == [n for n in wanted if n != 1]


def _weight_files(folder: Path) -> list[Path]:
    names = weight_names(folder)
    if names is not None:
        return [folder / name for name in names]
    others = sorted(
        path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    )
    raise ValueError(
        f"no {SINGLE} or {INDEX} in {folder}" + (f" (found {_some(others)}, which is not supported)" if others else "")
    )


def _keep(tensor: torch.Tensor) -> None:
    """Nothing is lent by random weights, so that nothing is released."""


def _some(names: list[str], limit: int = 8) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


class DummyWeights:
    """Random weights, generated fast: entry i of a checkpoint tensor is entry `offset(name) + i` of one fixed block of
    noise, repeated indefinitely.

    The block's length is prime, so that the rows of a matrix start at different positions in it.
    """

    BLOCK = 1_000_003
    STD = 0.02

    def __init__(self, seed: int):
        self.seed = seed
        self._noise = torch.randn(self.BLOCK, generator=torch.Generator().manual_seed(seed))
        self._blocks: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    def fill(self, placement: Placement, may_lend: bool) -> bool:
        """Fill a slice: matrices and biases are Gaussian around 0, other vectors around 1, unless their parameter has a
        `dummy_mean`, the mean of the checkpoint's tensor. Returns False, because no memory is lent.
        """
        part, target = placement.part, placement.target
        mean = 1.0 if len(part.shape) == 1 else 0.0
        mean = 0.0 if part.name.endswith("bias") else getattr(placement.parameter, "dummy_mean", mean)
        block = self._block(mean, target.dtype, target.device)
        offset = zlib.crc32(part.name.encode(), self.seed)
        first_dims = [dim for dim, _, _ in part.source]
        if part.view is None and first_dims in ([], [0]) and target.is_contiguous():
            start = part.source[0][1] if part.source else 0
            _repeat(block, offset + start * (part.shape[1] if len(part.shape) > 1 else 1), target.view(-1))
        else:
            whole = torch.empty(part.shape, dtype=target.dtype, device=target.device)
            _repeat(block, offset, whole.view(-1))
            target.copy_(part.of(whole))
        return False

    def _block(self, mean: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        key = mean, dtype, device
        if key not in self._blocks:
            self._blocks[key] = (self._noise * self.STD + mean).to(device, dtype)
        return self._blocks[key]


def _repeat(block: torch.Tensor, offset: int, out: torch.Tensor) -> None:
    """Compute `out[i] = block[(offset + i) % len(block)]` in long copies."""
    done = 0
    while done < len(out):
        start = (offset + done) % len(block)
        length = min(len(block) - start, len(out) - done)
        out[done : done + length] = block[start : start + length]
        done += length
