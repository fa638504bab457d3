"""LoRA adapters: in PEFT's format, adapter_config.json and adapter_model.safetensors, or a GGUF file of llama.cpp
(`lora_gguf.py`). Torch-free.

An adapter adds `scale * B A x` to the product of each linear layer that it has matrices for (arXiv:2106.09685). Every
error names the key or tensor at fault, but no path, because the server sends errors to clients.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.checkpoints.files import unreadable
from quire.checkpoints.gguf.header import is_gguf
from quire.checkpoints.hub import adapter_folder
from quire.checkpoints.lora_files import CONFIG, MAX_RANK, WEIGHTS, LoraFiles, LoraMatrices
from quire.checkpoints.lora_gguf import gguf_of, read_gguf_lora
from quire.checkpoints.safetensors import StoredTensor, read_header

LEAST_MAX_RANK = 64  # minimum of the largest accepted rank, if --max-lora-rank is not set
DEFAULT_MAX_LORAS = 8
ELSEWHERE = "LoRA adapters need all ranks and engines on one machine, which alone reads their files"
_LARGEST_CONFIG = 4 << 20
_WANTED = "give the folder of a PEFT adapter, or a GGUF adapter"
_MATRIX = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_TYPES = ("F32", "F16", "BF16")
# initialisations that leave the base model's weights as they are; others change them
_PLAIN_INIT = ("gaussian", "eva", "orthogonal", "true", "false")
# keys whose values, unless absent, null, false or empty, mean something that is not computed
_REFUSED = {
    "use_dora": "DoRA scales the base weights",
    "lora_bias": "biases of lora_B are not supported",
    "modules_to_save": "whole modules trained along with the matrices are not supported; train or export without them",
    "trainable_token_indices": "embeddings of single tokens are not supported",
    "layer_replication": "layers used more than once are not supported",
    "use_qalora": "QALoRA pools its inputs",
    "alora_invocation_tokens": "activated LoRA begins within a prompt",
    "use_bdlora": "block-diagonal matrices are not supported",
    "arrow_config": "routed adapters are not supported",
    "velora_config": "VeLoRA is not supported",
}


def read_lora(folder: str | Path) -> LoraFiles:
    """Return the adapter in a folder, or a GGUF file. Reads the header of its weights, not the weights.

    Raises ValueError with the error or the unsupported feature.
    """
    folder = Path(folder)
    require_adapter(folder)
    if file := gguf_of(folder):
        return read_gguf_lora(file)
    config = read_config(folder)
    _check_config(config)
    if not (folder / WEIGHTS).is_file():
        others = sorted(path.name for path in folder.glob("adapter_model*"))
        found = f" ({', '.join(others[:3])} cannot be read: convert it to safetensors)" if others else ""
        raise ValueError(f"there is no {WEIGHTS}{found}")
    try:
        tensors = read_header(folder / WEIGHTS)
    except ValueError as error:
        raise ValueError(str(error).replace(f"{folder}/", "")) from None
    modules = _modules(config, tensors)
    rank = max(one.rank for one in modules.values())
    base = config.get("base_model_name_or_path")
    return LoraFiles(folder, modules, rank, base if isinstance(base, str) and base else None)


def require_adapter(path: Path) -> None:
    """Raise ValueError unless `path` is a folder that can be read, or a GGUF file."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            if not (path / CONFIG).is_file():
                os.listdir(path)
            return
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                file.read(1)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"the path does not exist: {_WANTED}") from None
    except OSError as error:
        raise ValueError(f"the path cannot be read: {error.strerror}") from None
    if not (stat.S_ISREG(mode) and is_gguf(path)):
        raise ValueError(f"the path is neither a folder nor a GGUF file: {_WANTED}")


def read_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json. Raises ValueError."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise ValueError(f"{CONFIG} is larger than {_LARGEST_CONFIG >> 20} MiB")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(_no_config(folder)) from None
    except OSError as error:
        raise ValueError(f"cannot read {CONFIG}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} must be a JSON object")
    return config


def _no_config(folder: Path) -> str:
    """Return why a folder without adapter_config.json is no adapter: `gguf_of` found no GGUF file in it either."""
    names = sorted(path.name for path in folder.glob("*.gguf"))
    if len(names) > 1:
        return f"there is no {CONFIG}, and more than one GGUF file ({', '.join(names[:3])}): give one of them"
    if names:
        return f"there is no {CONFIG}, and {names[0]} is no GGUF file"
    return f"there is no {CONFIG}: {_WANTED}"


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, for an adapter that cannot be computed."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{CONFIG}: peft_type is {kind!r}, but only LORA is supported")
    if config.get("bias", "none") not in ("none", None):
        raise ValueError(f"{CONFIG}: bias is {config['bias']!r}: trained biases are not supported, only none")
    for key, reason in _REFUSED.items():
        if config.get(key) not in (None, False, [], {}, ""):
            raise ValueError(f"{CONFIG}: {key}: {reason}")
    init = config.get("init_lora_weights", True)
    if str(init).lower() not in _PLAIN_INIT:
        raise ValueError(
            f"{CONFIG}: init_lora_weights {init!r} changes the base model's weights; convert the adapter to plain LoRA "
            "(PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
        )
    _rank(config.get("r"), "r")
    _number(config.get("lora_alpha"), "lora_alpha")
    for key, check in (("rank_pattern", _rank), ("alpha_pattern", _number)):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"{CONFIG}: {key} must be an object")
        for pattern, value in patterns.items():
            _compiled(pattern, key)
            check(value, f"{key}.{pattern}")
    parameters = config.get("target_parameters") or []
    if not (isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)):
        raise ValueError(f"{CONFIG}: target_parameters must be a list of texts")
    if parameters and (config.get("rank_pattern") or config.get("alpha_pattern")):
        raise ValueError(f"{CONFIG}: target_parameters with rank_pattern or alpha_pattern is not supported")
    for key in ("target_modules", "exclude_modules"):
        value = config.get(key)
        if isinstance(value, str):
            _compiled(value, key)
        elif not (value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))):
            raise ValueError(f"{CONFIG}: {key} must be a text or a list of texts")


def _rank(value: Any, key: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ValueError(f"{CONFIG}: {key} is {value!r}, but must be a whole number from 1 to {MAX_RANK}")
    return value


def _number(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{CONFIG}: {key} is {value!r}, but must be a number")
    return float(value)


def _compiled(pattern: str, key: str) -> re.Pattern[str]:
    if len(pattern) > 10_000:
        raise ValueError(f"{CONFIG}: {key} is longer than 10000 characters")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{CONFIG}: {key}: {pattern!r} is no regular expression: {error}") from None


# ---- modules


def _modules(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, LoraMatrices]:
    """Return the matrices by module. Raises ValueError, naming the tensor, for one that cannot be used."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _MATRIX.fullmatch(name)
        if match is None:
            raise ValueError(f"{WEIGHTS} has the tensor {name!r}: {_why_not(name)}")
        sides = found.setdefault(match["module"], {})
        if match["side"] in sides:
            raise ValueError(f"{WEIGHTS} has {sides[match['side']]!r} and {name!r}, of one module")
        sides[match["side"]] = name
    if not found:
        raise ValueError(f"{WEIGHTS} has no tensors")
    return {module: _matrices(module, sides, config, tensors) for module, sides in found.items()}


def _why_not(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "DoRA is not supported"
    if "lora_embedding" in name:
        return "matrices of embeddings are not supported"
    if ".lora_" in name and name.endswith(".bias"):
        return "biases are not supported"
    return "only lora_A.weight and lora_B.weight are supported (no modules_to_save, no biases)"


def _matrices(
    module: str, sides: Mapping[str, str], config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> LoraMatrices:
    if len(sides) < 2:
        (there,) = sides.values()
        raise ValueError(f"{WEIGHTS} has {there!r}, but not the other of lora_A and lora_B")
    experts = _parameter_holder(module, config)
    if not (experts or is_target(module, config)):
        raise ValueError(f"{WEIGHTS} has matrices of {module}, which target_modules of {CONFIG} does not name")
    a, b = (tensors[sides[side]] for side in "AB")
    rank = _pattern_value(module, config.get("rank_pattern"), config["r"])
    for side, tensor in (("A", a), ("B", b)):
        if tensor.dtype not in _TYPES:
            raise ValueError(f"{sides[side]!r} has type {tensor.dtype}; supported: {', '.join(_TYPES)}")
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1]
    if not fits or (a.shape[0] % rank if experts else a.shape[0] != rank):
        raise ValueError(f"the matrices of {module} have shapes {a.shape} and {b.shape}, but rank {rank}")
    alpha = float(_pattern_value(module, config.get("alpha_pattern"), config["lora_alpha"]))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    number = a.shape[0] // rank if experts else None
    return LoraMatrices(sides["A"], sides["B"], rank, a.shape[1], b.shape[0], scale, number)


def _parameter_holder(module: str, config: Mapping[str, Any]) -> bool:
    """Return whether target_parameters names a tensor of all experts that this module holds. PEFT wraps a module once
    per parameter, and calls the inner ones base_layer.
    """
    module = module.replace(".base_layer", "")
    holders = [name.rpartition(".")[0] for name in config.get("target_parameters") or []]
    return module.endswith(".experts") and any(module == one or module.endswith(f".{one}") for one in holders)


def _pattern_value(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """Return the value of the first pattern that fits the end of a module's name, as PEFT reads rank_pattern."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default


def is_target(module: str, config: Mapping[str, Any]) -> bool:
    """Return whether target_modules and exclude_modules choose a module: by a list of names or name suffixes, or by a
    regular expression for whole names; all-linear chooses all.
    """
    if (excluded := config.get("exclude_modules")) and _fits(module, excluded):
        return False
    targets = config.get("target_modules")
    return targets is None or targets == "all-linear" or _fits(module, targets)


def _fits(module: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


# ---- settings


def parse_module(text: str) -> tuple[str, str, str | None]:
    """Return (name, path, name of the base model) of `name=path`, or of a JSON object with name, path and
    base_model_name.

    Raises ValueError.
    """
    if text.lstrip().startswith("{"):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--lora-modules: {text!r} is not JSON: {error}") from None
        unknown = sorted(given.keys() - {"name", "path", "base_model_name", "default_scale"})
        values = [given.get(key) for key in ("name", "path")]
        if unknown or not all(isinstance(value, str) and value for value in values):
            raise ValueError(
                f"--lora-modules: {text!r} must have name, path and optionally base_model_name and default_scale"
            )
        return *values, given.get("base_model_name")
    name, equals, path = text.partition("=")
    if not (name.strip() and equals and path.strip()):
        raise ValueError(f"--lora-modules: expected name=path or a JSON object, got {text!r}")
    return name.strip(), path.strip(), None


def default_scales(modules: list[str]) -> dict[str, float]:
    """Return the scale of each adapter of --lora-modules that requests for the model itself use. Raises ValueError."""
    found: dict[str, float] = {}
    for text in modules:
        scale = json.loads(text).get("default_scale", 0) if text.lstrip().startswith("{") else 0
        if not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise ValueError(f"--lora-modules: {text!r}: default_scale must be a number")
        if scale:
            found[parse_module(text)[0]] = float(scale)
    return found


def local_modules(modules: list[str], download_dir: str | None) -> list[str]:
    """Return --lora-modules with adapters of the Hub as folders, downloaded if needed. Raises ValueError."""
    found = []
    for text in modules:
        name, path, base = parse_module(text)
        try:
            local = adapter_folder(path, download_dir)
        except ValueError as error:
            raise ValueError(f"--lora-modules {name}: {error}") from None
        given = {"name": name, "path": local} | ({"base_model_name": base} if base else {})
        given |= {"default_scale": scale} if (scale := default_scales([text]).get(name)) else {}
        found.append(text if local == path else json.dumps(given))
    return found


def folders_at_start(modules: list[str], folder: str | None) -> list[tuple[str, Path, bool]]:
    """Return (name, path, whether it must be served) of the adapters that a server starts with: those of --lora-modules
    in order, then the folders in --lora-dir by name. Raises ValueError for settings that are wrong.
    """
    found: dict[str, tuple[str, Path, bool]] = {}
    for text in modules:
        name, path, _ = parse_module(text)
        if name in found:
            raise ValueError(f"--lora-modules: the name {name!r} is given twice")
        found[name] = name, Path(path).expanduser(), True
    if folder is not None:
        base = Path(folder).expanduser()
        try:
            paths = sorted(base.iterdir())
        except FileNotFoundError:
            raise ValueError(f"--lora-dir: there is no folder {folder}") from None
        except OSError as error:
            raise ValueError(f"--lora-dir: {unreadable(folder, error)}") from None
        for path in paths:
            name = path.stem if path.suffix == ".gguf" and path.is_file() and is_gguf(path) else path.name
            if name not in found and (path.is_dir() or name != path.name) and not name.startswith("."):
                found[name] = name, path, False
    return list(found.values())


def check_modules(modules: list[str]) -> None:
    """Raise ValueError for the first adapter of --lora-modules that cannot be read. They are on this machine."""
    for name, path, _ in folders_at_start(modules, None):
        try:
            read_lora(path)
        except ValueError as error:
            raise ValueError(f"--lora-modules {name}: {error} ({path})") from None


def check_counts(max_loras: int | None, max_cpu_loras: int | None) -> None:
    """Raise ValueError if RAM may hold fewer adapters than a step may use."""
    most = max_loras or DEFAULT_MAX_LORAS
    if max_cpu_loras is not None and max_cpu_loras < most:
        raise ValueError(f"--max-cpu-loras {max_cpu_loras} must be at least --max-loras {most}")


def max_rank(setting: int | None, modules: list[str], folder: str | None) -> int:
    """Return --max-lora-rank, by default the largest rank of the adapters at start, at least LEAST_MAX_RANK."""
    if setting is not None:
        return setting
    return max((LEAST_MAX_RANK, *(lora.rank for lora in _readable(modules, folder))))


def most_values(modules: list[str], folder: str | None) -> int:
    """Return the largest number of values of an adapter at start."""
    return max((lora.num_values for lora in _readable(modules, folder)), default=0)


def _readable(modules: list[str], folder: str | None) -> Iterator[LoraFiles]:
    """Yield the adapters at start, without those that cannot be read: they are reported when they are loaded."""
    for _, path, _ in folders_at_start(modules, folder):
        with contextlib.suppress(ValueError):
            yield read_lora(path)
