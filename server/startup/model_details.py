"""Facts about the model's files that clients show: format, family, number of parameters, kind of quantization."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.checkpoints.gguf.header import GgufFile, read_gguf
from quire.server.engines.supervisor import in_thread
from quire.server.values import Json

# of `general.file_type`: llama.cpp's numbers
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip
_PACKED = ("I32", "I64", "U8")  # types of tensors in safetensors that hold several weights per number
_WIDTHS = {"I32": 32, "I64": 64, "U8": 8}
# GGUF key without the architecture -> key of config.json
_HYPERPARAMETERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """`metadata` has GGUF's keys, for safetensors made from config.json. `digest` is of the files' headers and sizes,
    because that of all weights takes minutes.
    """

    format: str
    family: str
    num_parameters: int
    quantization: str
    size: int  # of the weights, in bytes
    digest: str  # sha256 in hexadecimal
    modified_at: float  # seconds since the epoch
    metadata: dict[str, Any] = field(repr=False)


class LazyDetails:
    """The details of the model in `folder`, read when they are first asked for."""

    def __init__(self, folder: str):
        self.folder = folder
        self._read: ModelDetails | None = None

    async def get(self) -> ModelDetails:
        if self._read is None:
            self._read = await in_thread(lambda: read_details(self.folder))
        return self._read


def read_details(folder: str) -> ModelDetails:
    """Read the headers of the model's files. Raises ValueError if they are missing or damaged."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config.json cannot be read: {error.strerror}") from error
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if settings.get("quant_method") == "gguf":
        return _gguf_details(read_gguf(settings["file"]))
    return _safetensors_details(Path(folder), config, settings)


def _gguf_details(file: GgufFile) -> ModelDetails:
    metadata, paths = file.metadata, sorted({tensor.path for tensor in file.tensors.values()})
    sizes = Counter[str]()
    for tensor in file.tensors.values():
        sizes[tensor.type] += tensor.size
    family = str(metadata.get("general.architecture", ""))
    num_parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    shown = {key: _as_json(value) for key, value in metadata.items()}
    return ModelDetails(
        "gguf",
        family,
        num_parameters,
        FILE_TYPES.get(metadata.get("general.file_type"), _most_common(sizes)),
        sum(path.stat().st_size for path in paths),
        _digest(paths),
        max(path.stat().st_mtime for path in paths),
        shown | {"general.parameter_count": num_parameters},
    )


def _as_json(value: Json) -> Any:
    """Return a value as JSON, None for a list: Ollama, too, shows only the names of lists."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return None if isinstance(value, list) else value


def _safetensors_details(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> ModelDetails:
    paths = sorted(folder.glob("*.safetensors"))
    sizes, num_parameters = Counter[str](), 0
    for path in paths:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                kind, (start, end) = entry["dtype"], entry["data_offsets"]
                sizes[kind] += end - start
                num_parameters += _num_weights(math.prod(entry["shape"]), kind, settings)
    family, files = str(config.get("model_type", "")), [folder / "config.json", *paths]
    metadata = {"general.architecture": family, "general.parameter_count": num_parameters}
    if isinstance(config.get("_name_or_path"), str):
        metadata["general.basename"] = os.path.basename(config["_name_or_path"])
    inner = config | (config.get("text_config") or {})
    for key, name in _HYPERPARAMETERS.items():
        if (value := inner.get(name)) is not None and not isinstance(value, (list, dict)):
            metadata[f"{family}.{key}"] = value
    method = str(settings.get("quant_method", ""))
    return ModelDetails(
        "safetensors",
        family,
        num_parameters,
        method.upper() or _most_common(sizes),
        sum(sizes.values()),
        _digest(files),
        max(path.stat().st_mtime for path in files),
        metadata,
    )


def _num_weights(num_values: int, kind: str, settings: dict[str, Any]) -> int:
    """Return the number of weights in a tensor: an element of a packed format holds several."""
    if not settings or kind not in _PACKED:
        return num_values
    bits = next((settings[key] for key in ("bits", "w_bit", "num_bits") if isinstance(settings.get(key), int)), 4)
    return num_values * _WIDTHS[kind] // max(bits, 1)


def _most_common(sizes: Counter[str]) -> str:
    return sizes.most_common(1)[0][0] if sizes else ""


def _digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            found.update(f"{path.name} {path.stat().st_size}\n".encode())
            found.update(file.read(1 << 20))
    return found.hexdigest()


def in_words(number: int) -> str:
    """Return a number as Ollama writes parameter counts: 134515008 -> "134.52M"."""
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2)):
        if number >= size:
            return f"{number // size}{letter}" if number % size == 0 else f"{number / size:.{digits}f}{letter}"
    return f"{number / 1000:.0f}K" if number >= 1000 else str(number)
