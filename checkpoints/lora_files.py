"""The content of a LoRA adapter's files, in PEFT's format or llama.cpp's. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's
GGUF = "adapter.gguf"  # the name of a copy; original files may have any name
FILES = (CONFIG, WEIGHTS, GGUF)
MAX_RANK = 512


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """The matrices of one module: A `[rank, in]` and B `[out, rank]`, by the names of their tensors. For a tensor of E
    experts they are A `[E * rank, in]`, expert by expert, and B `[out, rank * E]`, where every E-th column belongs to
    the same expert.
    """

    a: str
    b: str
    rank: int
    in_features: int
    out_features: int
    scale: float
    num_experts: int | None = None  # None: the matrices are of one weight
    index: int | None = None  # for tensors of all experts, [E, rank, in] and [E, out, rank]
    swapped: bool = False  # rows of B are in llama.cpp's order of the pairs of a rotary embedding


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """An adapter whose files were read and checked. `modules` are keyed by name in the base model."""

    folder: Path
    modules: dict[str, LoraMatrices]
    rank: int  # the largest
    base_model: str | None  # its name in adapter_config.json

    is_gguf: bool = False

    @property
    def weights(self) -> Path:
        return self.folder / (GGUF if self.is_gguf else WEIGHTS)

    @property
    def num_values(self) -> int:
        """Return the number of values in all matrices."""
        return sum(
            (one.num_experts or 1) * one.rank * (one.in_features + one.out_features) for one in self.modules.values()
        )


def content_hash(folder: Path) -> str:
    """Return a hash of the adapter's files: equal hashes mean equal results."""
    digest = hashlib.sha256()
    for path in (folder / name for name in FILES):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
