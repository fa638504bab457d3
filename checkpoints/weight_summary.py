"""The summary of a checkpoint for `quire check`: format, size and bits per weight; and its identity on other machines.
Torch-free; reads headers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from quire.checkpoints.gguf.header import read_gguf
from quire.checkpoints.reading import read_object
from quire.checkpoints.safetensors import read_header, read_index, stored_files
from quire.checkpoints.sizes import format_bytes

_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def weight_summary(folder: str, config: dict[str, Any], num_weights: int) -> str:
    """Return one line about the weights of the model in `folder`, whose parsed config.json is `config`.
    `num_weights`: number of weights of the unquantized model.
    """
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    if settings.get("quant_method") == "gguf":
        file = read_gguf(settings["file"], arrays=False)
        sizes = Counter()
        for tensor in file.tensors.values():
            sizes[tensor.type] += tensor.size
        num_files = len({tensor.path for tensor in file.tensors.values()})
    else:
        sizes, num_files = _safetensors_sizes(Path(folder))
    num_bytes = sum(sizes.values())
    shares = ", ".join(f"{kind} {100 * size / num_bytes:.1f} %" for kind, size in sizes.most_common(5))
    return (
        f"checkpoint: {describe_format(settings, sizes)}, {format_bytes(num_bytes)} in {num_files} "
        f"file{'s' if num_files > 1 else ''}, {8 * num_bytes / num_weights:.2f} bits per weight "
        f"({_count(num_weights)} weights; {shares} of the bytes)"
    )


def _count(number: int) -> str:
    return f"{number / 1e9:,.3g} billion" if number >= 1e9 else f"{number / 1e6:,.3g} million"


def describe_format(settings: dict[str, Any], sizes: Counter[str]) -> str:
    """Return the format that `quantization_config` declares, in words; `sizes` are the bytes of each type of tensor."""
    method = settings.get("quant_method", "")
    match method:
        case "":
            kind = sizes.most_common(1)[0][0] if sizes else ""
            return _FLOATS.get(kind, kind)
        case "gguf":
            return "GGUF"
        case "compressed-tensors":
            groups = settings.get("config_groups") or {}
            kinds = dict.fromkeys(_weights(group.get("weights") or {}) for group in groups.values())
            return f"compressed-tensors {settings.get('format', '')} ({'; '.join(kinds)})"
        case "fp8" | "fbgemm_fp8" | "mxfp8":
            block = settings.get("weight_block_size")
            return f"{method} ({'x'.join(map(str, block)) + ' blocks' if block else 'e4m3'})"
        case "awq" | "gptq":
            group = settings.get("group_size", settings.get("q_group_size", 128))
            order = ", act-order" if settings.get("desc_act") else ""
            return f"{method} ({settings.get('bits', settings.get('w_bit', 4))} bits, {_groups(group)}{order})"
        case "auto-round" | "intel/auto-round":
            packing = settings.get("packing_format") or settings.get("backend") or "auto_round:auto_gptq"
            return f"auto-round ({settings.get('bits')} bits, {_groups(settings.get('group_size', 128))}, {packing})"
        case "quark":
            weight = (settings.get("global_quant_config") or {}).get("weight") or {}
            weight = weight[0] if isinstance(weight, list) else weight
            return f"quark ({weight.get('dtype')} {weight.get('qscheme')})"
        case "bitsandbytes":
            four = f"4 bits, {settings.get('bnb_4bit_quant_type', 'fp4')}"
            return f"bitsandbytes ({four if settings.get('load_in_4bit') else '8 bits'})"
        case "modelopt" | "modelopt_fp4":
            return f"modelopt ({(settings.get('quantization') or settings).get('quant_algo')})"
    return method


def _weights(weights: dict[str, Any]) -> str:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    scales = _groups(group) if group else f"a scale per {strategy}"
    return f"{weights.get('num_bits', 8)}-bit {weights.get('type', 'int')}, {scales}"


def _groups(size: int) -> str:
    return f"groups of {size}" if size > 0 else "whole rows"


def _safetensors_sizes(folder: Path) -> tuple[Counter[str], int]:
    """Return (bytes of each type of tensor, number of files)."""
    sizes: Counter[str] = Counter()
    paths = stored_files(folder)
    for path in paths:
        for tensor in read_header(path).values():
            sizes[tensor.dtype] += tensor.end - tensor.start
    return sizes, len(paths)


def model_identity(folder: str, has_weights: bool = True) -> str:
    """Return a digest of config.json and of the names and sizes of the files of weights, which is equal for copies on
    other machines. The files are not read.
    """
    path = Path(folder)
    config = read_object(path / "config.json")
    found: dict[str, int] = {}
    settings = _without_places(config, found)
    names = set((read_index(path) or {}).values()) or {file.name for file in path.glob("*.safetensors")}
    for name in names if has_weights else ():
        if (file := path / name).is_file():
            found[name] = file.stat().st_size
    text = json.dumps([settings, sorted(found.items())], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_places(value: Any, found: dict[str, int]) -> Any:
    """Return a config in which GGUF files have names instead of paths. Their sizes are added to `found`."""
    if isinstance(value, dict):
        return {key: _without_places(one, found) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_places(one, found) for one in value]
    if isinstance(value, str) and value.endswith(".gguf"):
        file = Path(value)
        if file.is_file():
            found[file.name] = file.stat().st_size
        return file.name
    return value
