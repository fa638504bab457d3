"""The 8-bit KV cache that a checkpoint declares: the type that it was calibrated for, and one scale per layer for keys
and for values.

The number x is stored as x / scale, in e4m3 or as an integer. Writers name the tensors differently; the older ones have
one scale, `kv_scale`, for both.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quire.checkpoints.files import damaged_weights
from quire.checkpoints.safetensors import SINGLE, read_index, weight_names

Scales = dict[int, tuple[float, float]]  # layer -> (of keys, of values)

_SCALE = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.\w+\.(?:attn\.)?(?:(?:[kv]|qkv)_proj\.)?"
    r"(?P<kind>k_scale|v_scale|kv_scale|(?<=k_proj\.)output_scale|(?<=v_proj\.)output_scale)$"
)


def is_scale(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a scale for keys or values."""
    return bool(_SCALE.search(name))


@dataclass(frozen=True, slots=True)
class Declared:
    """The type of KV cache that a config.json asks for: "fp8", "int8", or None with the words that ask for another."""

    kind: str | None
    words: str


def declared(raw: dict[str, Any]) -> Declared | None:
    """Return the cache type that a parsed config.json asks for, or None."""
    config = raw.get("quantization_config") or raw.get("compression_config") or {}
    config = config.get("quantization") or config  # modelopt
    if scheme := config.get("kv_cache_scheme"):
        return Declared(_kind_of(scheme), f"kv_cache_scheme {json.dumps(scheme)}")
    if names := (config.get("export") or {}).get("kv_cache_group"):  # Quark
        return Declared(_quark_kind(config, names), f"export.kv_cache_group {json.dumps(names)}")
    algorithm = config.get("kv_cache_quant_algo")
    if not algorithm or str(algorithm).lower() in ("none", "auto"):
        return None
    return Declared({"FP8": "fp8", "INT8": "int8"}.get(str(algorithm).upper()), f"kv_cache_quant_algo {algorithm}")


def _kind_of(scheme: Any) -> str | None:
    """Return the type of compressed-tensors' `kv_cache_scheme`; modelopt writes a dict with the same keys."""
    if not isinstance(scheme, dict) or scheme.get("num_bits") != 8 or not scheme.get("symmetric", True):
        return None
    return {"float": "fp8", "int": "int8"}.get(scheme.get("type", "int"))


def _quark_kind(config: dict[str, Any], names: list[str]) -> str | None:
    """Return the type of the outputs of the layers that `names` lists, by their patterns in `layer_quant_config`."""
    layers = config.get("layer_quant_config") or {}
    outputs = [
        values.get("output_tensors") or {}
        for pattern, values in layers.items()
        if any(fnmatchcase(pattern, name) for name in names)
    ]
    kinds = {
        (output.get("dtype"), output.get("qscheme"))
        for part in outputs
        for output in (part if isinstance(part, list) else [part])
    }
    return {("fp8_e4m3", "per_tensor"): "fp8"}.get(kinds.pop()) if len(kinds) == 1 else None


def read_scales(folder: str, latent: bool = False) -> Scales | None:
    """Return the scales of the layers that have one number for keys and one for values, or None if there are no
    safetensors in `folder`. Latents (MLA) need the number for keys only: their values are a part of them.

    Raises:
        ValueError: a scale is not positive, or a file is damaged.
    """
    files = _files(Path(folder))
    if not files:
        return None
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for path, names in files.items():
        matches = [(name, match) for name in names if (match := _SCALE.search(name))]
        if not matches:
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name, match in matches:
                    tensor = file.get_tensor(name)
                    if tensor.numel() != 1:  # one per head
                        continue
                    for kind in _kinds(name, match["kind"]):
                        found[int(match["layer"])][kind] = _positive(name, float(tensor))
        except (OSError, SafetensorError) as error:
            raise ValueError(damaged_weights(path, error)) from error
    v = "k" if latent else "v"
    return {layer: (scales["k"], scales[v]) for layer, scales in sorted(found.items()) if {"k", v} <= scales.keys()}


def _kinds(name: str, kind: str) -> str:
    """Return which scales a tensor is: "k", "v" or "kv"."""
    if kind == "output_scale":
        return "k" if name.endswith("k_proj.output_scale") else "v"
    return kind.removesuffix("_scale")


def _positive(name: str, scale: float) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name} is {scale}, but a scale must be positive and finite: download the model again")
    return scale


def _files(folder: Path) -> dict[Path, Iterable[str]]:
    """Return the names of the tensors in each safetensors file, without opening the files that an index describes."""
    names = weight_names(folder)
    if names is not None and names != [SINGLE]:
        files: dict[Path, list[str]] = defaultdict(list)
        for name, file in (read_index(folder) or {}).items():
            files[folder / file].append(name)
        return {path: names for path, names in files.items() if path.is_file()}
    single = folder / SINGLE
    if not single.is_file():
        return {}
    try:
        with safe_open(single, framework="pt") as file:
            return {single: list(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ValueError(damaged_weights(single, error)) from error
