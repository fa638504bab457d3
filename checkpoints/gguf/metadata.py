"""The metadata of a GGUF file by the names that all architectures share. Torch-free."""

from __future__ import annotations

from typing import Any

from quire.checkpoints.gguf.header import GgufFile

Settings = dict[str, Any]  # keys of a config.json
FULL, SLIDING = "full_attention", "sliding_attention"


class Metadata:
    """The metadata of a file, without the prefix of its architecture."""

    def __init__(self, file: GgufFile):
        self.file, self.kind = file, file.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `kind.key`. Raises ValueError if there is none, nor a default."""
        value = self.file.metadata.get(f"{self.kind}.{key}", default)
        if value is None:
            raise ValueError(f"{self.file.path}: the metadata has no {self.kind}.{key}")
        return value

    def find(self, key: str) -> Any:
        """The value, or None."""
        return self.file.metadata.get(f"{self.kind}.{key}")

    def one(self, key: str, default: Any = None) -> Any:
        """A value that files may have per layer, which must be the same for all layers with any."""
        value = self.get(key, default)
        if not isinstance(value, list):
            return value
        different = set(value) - {0}
        if len(different) > 1:
            raise ValueError(f"{self.file.path}: {self.kind}.{key} differs from layer to layer, which is not supported")
        return different.pop() if different else 0

    def has(self, tensor: str) -> bool:
        """Whether layer 0 has the tensor."""
        return f"blk.0.{tensor}" in self.file.tensors

    def has_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.has("attn_q.bias") or self.has("attn_qkv.bias")

    def window(self) -> int | None:
        return self.find("attention.sliding_window") or None

    def layer_types(self) -> list[str] | None:
        """The kinds of attention, if the file lists them."""
        pattern = self.find("attention.sliding_window_pattern")
        if pattern is None:
            return None
        if isinstance(pattern, list):
            return [SLIDING if slides else FULL for slides in pattern]
        layers = range(self.get("block_count"))  # the last of each period is full; with 0 none is
        return [FULL if pattern and i % pattern == pattern - 1 else SLIDING for i in layers]

    def listed_windows(self) -> Settings:
        """sliding_window and, if the file has them, layer_types."""
        kinds = self.layer_types()
        return {"sliding_window": self.window()} | ({"layer_types": kinds} if kinds else {})

    def query_scalar(self, default: int) -> float:
        """The number whose inverse square root scales the scores of attention."""
        scale = self.find("attention.scale")
        return scale**-2 if scale else default

    def rows(self, tensor: str) -> int:
        """The number of rows of a tensor, 0 if the file does not have it."""
        found = self.file.tensors.get(tensor)
        return found.shape[0] if found else 0

    def check(self, key: str, *served: Any) -> None:
        """Raise ValueError if the file has another value of `key` than those `served`."""
        if (value := self.find(key)) is not None and value not in served:
            raise ValueError(f"{self.file.path}: {self.kind}.{key} must be {served[0]!r}, not {value!r}")
