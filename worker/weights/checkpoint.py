"""The tensors of a checkpoint's files, and the slices that parameters take of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open

from quire.checkpoints.files import damaged_weights
from quire.checkpoints.safetensors import INDEX, SINGLE, read_index, weight_names
from quire.worker.host import huge_pages
from quire.worker.layers.linear import ANY_LENGTH, Part, narrowed
from quire.worker.layers.quantization.kv_scales import is_scale
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.decoder import CausalLM
from quire.worker.transformer.names import TensorNames


@dataclass(frozen=True, slots=True)
class Placement:
    """A slice to copy, and the parameter it belongs to."""

    part: Part
    parameter: torch.nn.Parameter

    @property
    def target(self) -> torch.Tensor:
        """Return the destination inside the parameter."""
        return narrowed(self.parameter.data, self.part.target)


class Checkpoint:
    """The safetensors files of a folder: those listed in model.safetensors.index.json, or model.safetensors.

    A context manager; the files are open inside it.
    """

    is_mapped: ClassVar[bool] = True  # whether the files return views of their mappings, each read only once

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
        """Return the file of a tensor: if several have that name, the one that the index lists."""
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
        """Return the names that the model's tensors have in these files."""
        return model.tensor_names(self.position)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor `name`: a view of the file's mapping, which is not read yet."""
        return self._file_of[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def holds(self, parts: Iterable[Part]) -> bool:
        """Return whether the files have the tensors of `parts`, in their shapes."""
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
            f"{what}: {_shorten(names)}"
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
        tensor = part.take(tensor if tensor.shape == part.shape else tensor.reshape(part.shape))
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
    """Return whether the shapes agree except for dimensions of size 1, which writers of scales add or omit."""
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
        f"no {SINGLE} or {INDEX} in {folder}"
        + (f" (found {_shorten(others)}, which is not supported)" if others else "")
    )


def _shorten(names: list[str], limit: int = 8) -> str:
    names = sorted(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
