"""LoRA adapters of llama.cpp: GGUF files of type adapter, with matrices *.lora_a and *.lora_b. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from quire.checkpoints.gguf.architectures import ARCHITECTURES
from quire.checkpoints.gguf.header import GgufFile, GgufTensor, is_gguf, read_gguf
from quire.checkpoints.gguf.names import is_stack, stack_names, tensor_name
from quire.checkpoints.lora_files import CONFIG, MAX_RANK, LoraFiles, LoraMatrices

_MATRIX = re.compile(r"(?P<weight>.+\.weight)\.lora_(?P<side>[ab])")
# modules whose rows are the same in all files
_SERVED = re.compile(
    r"model\.layers\.\d+\.(?:self_attn\.(?:q|k|v|o|qkv)_proj|mlp\.(?:shared_expert\.|experts\.)?(?:gate|up|down)_proj)"
)


def gguf_of(path: Path) -> Path | None:
    """Return the GGUF adapter that a path is, or the only one in its folder if that has no PEFT adapter."""
    if path.is_file():
        return path if is_gguf(path) else None
    files = [] if (path / CONFIG).is_file() or not path.is_dir() else sorted(path.glob("*.gguf"))
    return files[0] if len(files) == 1 and is_gguf(files[0]) else None


def read_gguf_lora(path: Path) -> LoraFiles:
    """Read an adapter. Raises ValueError, without the path, for errors and unsupported features."""
    try:
        return _read(read_gguf(path))
    except ValueError as error:
        raise ValueError(str(error).replace(f"{path.parent}/", "")) from None


def _read(file: GgufFile) -> LoraFiles:
    metadata = file.metadata
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (value := metadata.get(key)) != wanted:
            raise ValueError(f"the GGUF file is no LoRA adapter: {key} is {value!r}, not {wanted!r}")
    if metadata.get("adapter.alora.invocation_tokens"):
        raise ValueError("adapter.alora.invocation_tokens: activated LoRA begins within a prompt")
    name = metadata.get("general.architecture")
    if (architecture := ARCHITECTURES.get(name)) is None:
        raise ValueError(f"general.architecture is {name!r}, which is not supported")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if type(alpha) not in (int, float) or abs(alpha) > 1e6:
        raise ValueError(f"adapter.lora.alpha is {alpha!r}, but must be a number")
    pairs: dict[str, dict[str, str]] = {}
    for tensor in file.tensors:
        if (match := _MATRIX.fullmatch(tensor)) is None:
            raise ValueError(f"the GGUF file has the tensor {tensor!r}; only *.weight.lora_a and .lora_b are supported")
        pairs.setdefault(match["weight"], {})[match["side"]] = tensor
    if not pairs:
        raise ValueError("the GGUF file has no tensors")
    modules = {}
    for weight, sides in pairs.items():
        if len(sides) < 2:
            (there,) = sides.values()
            raise ValueError(f"the GGUF file has {there!r}, but not the other of lora_a and lora_b")
        module = tensor_name(weight, architecture.names).removesuffix(".weight")
        if not _SERVED.fullmatch(module):
            raise ValueError(f"the adapter has matrices for {weight}, which is not supported")
        swapped = architecture.swapped and module.endswith((".q_proj", ".k_proj"))
        a, b = file.tensors[sides["a"]], file.tensors[sides["b"]]
        modules.update(_module_tensors(module, a, b, (sides["a"], sides["b"]), float(alpha), swapped))
    return LoraFiles(file.path.parent, modules, max(one.rank for one in modules.values()), None, is_gguf=True)


def _module_tensors(
    module: str, a: GgufTensor, b: GgufTensor, names: tuple[str, str], alpha: float, swapped: bool
) -> Iterator[tuple[str, LoraMatrices]]:
    stack = is_stack(f"{module}.")
    fits = len(a.shape) == len(b.shape) == 2 + stack and a.shape[-2] == b.shape[-1]
    if not fits or (stack and a.shape[0] != b.shape[0]):
        raise ValueError(f"the matrices {names[0]} and {names[1]} have shapes {[*a.shape]} and {[*b.shape]}")
    if not 1 <= (rank := b.shape[-1]) <= MAX_RANK:
        raise ValueError(f"{names[1]} has rank {rank}, but must have 1 to {MAX_RANK}")
    scale = alpha / rank if alpha else 1.0
    ones = stack_names(f"{module}.", a.shape[0]) if stack else [f"{module}."]
    for i, one in enumerate(ones):
        matrices = LoraMatrices(
            *names, rank, a.shape[-1], b.shape[-2], scale, index=i if stack else None, swapped=swapped
        )
        yield one.removesuffix("."), matrices
