"""The names of models: one function finds the path, or the name on the Hub, that a user's name stands for."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.checkpoints import packaged
from quire.checkpoints.gguf.folder import chosen_in, gguf_names
from quire.checkpoints.library import aliases, ollama_names, stores

_HUB = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/")
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_IN_FOLDER = re.compile(r"(?P<folder>.+):(?P<quantization>[\w.-]+)")


def located(model: str) -> str:
    """Return the path of `model` on this machine if it has one, else its name on the Hub or among the packaged models.

    In this order: a path, FOLDER:QUANTIZATION, a name by `quire cp` or `quire create`, a packaged model, the stores of
    Ollama, llama.cpp and LM Studio, Ollama's names for models of the Hub. Raises ValueError if a name is known but its
    file is missing.
    """
    path = os.path.expanduser(model)
    if os.path.exists(path):
        return _only_gguf(path) or model
    if (match := _IN_FOLDER.fullmatch(path)) and os.path.isdir(match["folder"]):
        return _in_folder(match["folder"], match["quantization"])
    if model.startswith((".", "/", "~")):
        return model
    if (own := aliases.find(model)) is not None:
        target = own.base
        if os.path.isabs(target) and not os.path.exists(target):
            raise ValueError(f"model: {model} is your name for {target}, which is gone: `quire rm {model}`")
        return target if os.path.exists(target) else _known(target)
    return _known(model)


def on_hub(model: str) -> str:
    """Return `model` without the host of the Hub: `hf.co/ORG/NAME:QUANTIZATION` is ORG/NAME:QUANTIZATION."""
    return _HUB.sub("", model, count=1) if _HUB.match(model) else model


def is_hub_adapter(path: str) -> bool:
    """Return whether the path of a LoRA adapter can only be a Hub id, ORG/NAME: there is no such file or folder."""
    is_id = path.count("/") == 1 and _ID.fullmatch(path) and not path.startswith((".", "~"))
    return bool(is_id) and not os.path.exists(path)


def same_model(model: str, listed: list[str]) -> str:
    """Return the name in `listed` that means the same as `model`: `model` itself, else a name that stands for the same
    files of the Hub; `model` unchanged if there is none.
    """
    if model in listed:
        return model
    wanted = _canonical(model)
    return next((name for name in listed if _canonical(name) == wanted), model)


def _canonical(model: str) -> str:
    try:
        own = aliases.find(model)
        if own is not None and not own.is_plain:  # it answers differently from its base
            return aliases.canonical(model)
        name = on_hub(model if own is None else own.base)
        return (ollama_names.on_hub(name) or name).lower()
    except ValueError:  # a tag that the table lacks, a damaged file: the name stands for itself
        return model


def not_found(model: str) -> str:
    """Return the places where a name was looked for, for the end of a message; "" for a path."""
    if model.startswith((".", "/", "~")):
        return ""
    return (
        f". Looked for it as a path, as a name of `quire cp`, as a packaged model ({', '.join(packaged.MODELS)}), in "
        f"{stores.places()}, and among the {len(ollama_names.table())} names of Ollama's library that are known here"
    )


def _known(model: str) -> str:
    name = on_hub(model)
    if name in packaged.MODELS:
        return name
    if not _is_downloaded(name) and (path := stores.find(name)) is not None:
        return str(path)
    return name if name != model else ollama_names.on_hub(name) or name


def _is_downloaded(name: str) -> bool:
    """Return whether the Hub's cache has the repository ORG/NAME: its safetensors go before a GGUF file elsewhere."""
    if ":" in name or name.count("/") != 1:
        return False
    return (hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots").is_dir()


def hub_cache() -> Path:
    """Return the folder of the Hub's cache, as huggingface_hub finds it, without importing it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache).expanduser()


def _only_gguf(path: str) -> str | None:
    """Return the GGUF file of a folder that has one and no config.json, else None."""
    try:
        names = os.listdir(path)
    except OSError:  # a file, or a folder that cannot be read: the caller reports it
        return None
    found = gguf_names(sorted(names))
    if "config.json" in names or len(found) != 1:
        return None
    return os.path.join(path, found[0])


def _in_folder(folder: str, quantization: str) -> str:
    names = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*.gguf"))]
    return os.path.join(folder, chosen_in(names, quantization, f"{folder}:{quantization}"))
