"""The metadata of a GGUF file by the names that all architectures share. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from quire.checkpoints.gguf.header import GgufFile

Settings = dict[str, Any]  # keys of a config.json
NORM_EPSILONS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
FULL, SLIDING = "full_attention", "sliding_attention"


class Default(NamedTuple):
    """The `value` of a key that files of the architectures `kinds` may leave out (of all, without `kinds`), or a
    function that derives it from the rest of the file and returns None if that is not possible. `note` is for the
    documentation.
    """

    value: Any | Callable[[Metadata], Any]
    kinds: tuple[str, ...] = ()
    note: str = ""


Defaults = Mapping[str, tuple[Default, ...]]  # the first one that fits an architecture counts


class Metadata:
    """The metadata of a file, without the prefix of its architecture."""

    def __init__(self, file: GgufFile, defaults: Defaults):
        self.file, self.kind = file, file.metadata.get("general.architecture")
        self._defaults = defaults

    def get(self, key: str) -> Any:
        """Return the value of `kind.key`, or its default. Raises ValueError if there is neither."""
        value = self.find(key)
        if value is None:
            value = self._default(key)
        if value is None:
            raise ValueError(f"{self.file.path}: the metadata has no {self.kind}.{key}")
        return value

    def either(self, *keys: str) -> Any:
        """Return the value of the first key that the file has. Raises ValueError if it has none of them."""
        found = next((value for key in keys if (value := self.find(key)) is not None), None)
        if found is None:
            names = " nor ".join(f"{self.kind}.{key}" for key in keys)
            raise ValueError(f"{self.file.path}: the metadata has neither {names}")
        return found

    def find(self, key: str) -> Any:
        """Return the value that the file has, or None."""
        return self.file.metadata.get(f"{self.kind}.{key}")

    def _default(self, key: str) -> Any:
        for default in self._defaults.get(key, ()):
            if not default.kinds or self.kind in default.kinds:
                return default.value(self) if callable(default.value) else default.value
        return None

    def one(self, key: str) -> Any:
        """Return a value that files may have per layer, which must be the same for all layers with any."""
        value = self.get(key)
        if not isinstance(value, list):
            return value
        different = set(value) - {0}
        if len(different) > 1:
            raise ValueError(f"{self.file.path}: {self.kind}.{key} differs from layer to layer, which is not supported")
        return different.pop() if different else 0

    def each(self, key: str) -> list[Any]:
        """Return the value for each layer; a file may have one for all."""
        value, count = self.get(key), self.num_layers()
        return value[:count] if isinstance(value, list) else [value] * count

    def num_layers(self) -> int:
        """Return the number of layers, without those that draft tokens, which come last."""
        return self.get("block_count") - self.get("nextn_predict_layers")

    def has(self, tensor: str) -> bool:
        """Return whether layer 0 has the tensor."""
        return f"blk.0.{tensor}" in self.file.tensors

    def has_bias(self) -> bool:
        """Return whether q, k and v have biases."""
        return self.has("attn_q.bias") or self.has("attn_qkv.bias")

    def window(self) -> int | None:
        """Return the number of tokens in a window of attention, or None if there are no windows."""
        return self.get("attention.sliding_window") or None

    def layer_types(self, full_first: bool = False) -> list[str]:
        """Return the kinds of attention: the last layer of each period is full, or the first one; with period 0 none
        is.
        """
        pattern, layers = self.get("attention.sliding_window_pattern"), range(self.num_layers())
        if isinstance(pattern, list):
            return [SLIDING if slides else FULL for slides in pattern[: len(layers)]]
        full = 0 if full_first else pattern - 1
        return [FULL if pattern and i % pattern == full else SLIDING for i in layers]

    def listed_windows(self, full_first: bool = False) -> Settings:
        """Return sliding_window and layer_types."""
        window, all_full = self.window(), [FULL] * self.num_layers()
        return {"sliding_window": window, "layer_types": self.layer_types(full_first) if window else all_full}

    def query_scalar(self, default: int) -> float:
        """Return the number whose inverse square root scales the scores of attention."""
        scale = self.find("attention.scale")
        return scale**-2 if scale else default

    def rows(self, tensor: str) -> int:
        """Return the number of rows of a tensor, 0 if the file does not have it."""
        found = self.file.tensors.get(tensor)
        return found.shape[0] if found else 0

    def columns(self, tensor: str) -> int:
        """Return the number of columns of a tensor, 0 if the file does not have it."""
        found = self.file.tensors.get(tensor)
        return found.shape[-1] if found else 0

    def layers_with(self, tensor: str) -> list[int]:
        """Return the layers that have the tensor."""
        return [i for i in range(self.num_layers()) if f"blk.{i}.{tensor}" in self.file.tensors]

    def check(self, key: str, *served: Any) -> None:
        """Raise ValueError if the value of `key`, or its default, is not one of those `served`."""
        value = self.find(key)
        if value is None:
            value = self._default(key)
        if value is not None and value not in served:
            raise ValueError(f"{self.file.path}: {self.kind}.{key} must be {served[0]!r}, not {value!r}")
