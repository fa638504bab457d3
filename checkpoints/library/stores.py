"""The models that Ollama, llama.cpp and LM Studio keep on this machine. Their folders are only read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoints.gguf.folder import gguf_names, is_first, quantized

OLLAMA, LLAMA_CPP, LM_STUDIO = "Ollama", "llama.cpp", "LM Studio"
_OLLAMA_LIBRARY = "registry.ollama.ai"
_HUB_HOSTS = ("hf.co", "huggingface.co")
_WEIGHTS = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_NAME = re.compile(r"(?:(?P<org>[\w.-]+)/)?(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?")
_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<path>.+\.gguf)", re.IGNORECASE)
_MAX_FILES = 10_000  # of a store, so that a wrong variable (LLAMA_CACHE=/) does not walk the whole disk
_MAX_MANIFEST = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in another program's store, under the name that `quire serve` takes; `path` is its first GGUF file."""

    name: str
    path: Path
    source: str


def ollama_folders() -> list[Path]:
    """Return $OLLAMA_MODELS, or the user's folder and the one of the Linux service."""
    if given := os.environ.get("OLLAMA_MODELS"):
        return [Path(given).expanduser()]
    return [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def llama_cpp_folder() -> Path:
    """Return $LLAMA_CACHE, by default ~/.cache/llama.cpp."""
    if given := os.environ.get("LLAMA_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/llama.cpp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama.cpp"


def lm_studio_folders() -> list[Path]:
    return [Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"]


def find(name: str) -> Path | None:
    """Return the GGUF file of `NAME[:TAG]`, `ORG/NAME[:TAG]` or `ORG/NAME/FILE.gguf` in one of the stores.

    Raises ValueError if a store has the model but not its file.
    """
    if match := _FILE.fullmatch(name):
        return _named_file(match["repo"], match["path"])
    if not (match := _NAME.fullmatch(name)):
        return None
    if (path := _in_ollama(match["org"], match["name"], match["tag"] or "latest")) is not None:
        return path
    if match["org"] is None:
        return None
    repository = f"{match['org']}/{match['name']}"
    for folder, names in ((_llama_cpp_files(repository)), *_lm_studio_files(repository)):
        found = quantized(list(names), match["tag"]) if match["tag"] else [n for n in names if is_first(n)]
        if len(found) == 1:
            return folder / names[found[0]]
    return None


def stored() -> Iterator[Stored]:
    """Yield every model of the stores. What cannot be read is left out."""
    for folder in ollama_folders():
        for manifest in sorted(_files(folder / "manifests")):
            with contextlib.suppress(ValueError):  # damaged, or an adapter: `quire show` has the reason
                if (path := _weights(folder, manifest)) is not None:
                    yield Stored(_ollama_name(manifest.relative_to(folder / "manifests").parts), path, OLLAMA)
    folder = llama_cpp_folder()
    for path in sorted(_files(folder)):
        if path.suffix.lower() == ".gguf" and path.parent == folder and is_first(path.name):
            yield Stored(str(path), path, LLAMA_CPP)
    for folder in lm_studio_folders():
        for path in sorted(_files(folder)):
            parts = path.relative_to(folder).parts
            if path.suffix.lower() == ".gguf" and len(parts) > 2 and is_first(path.name):
                yield Stored("/".join(parts), path, LM_STUDIO)


def owner(path: str | os.PathLike) -> str | None:
    """Return the program in whose store `path` is, or None."""
    places = [(folder, OLLAMA) for folder in ollama_folders()]
    places += [(llama_cpp_folder(), LLAMA_CPP), *((folder, LM_STUDIO) for folder in lm_studio_folders())]
    absolute = Path(os.path.abspath(path))
    return next((program for folder, program in places if absolute.is_relative_to(folder.absolute())), None)


def places() -> str:
    """Return the folders of the stores, for a message."""
    return (
        f"{OLLAMA}'s models ({', '.join(map(str, ollama_folders()))}), {LLAMA_CPP}'s ({llama_cpp_folder()}) and "
        f"{LM_STUDIO}'s ({', '.join(map(str, lm_studio_folders()))})"
    )


def _files(folder: Path) -> Iterator[Path]:
    """Yield at most _MAX_FILES files below `folder`, in any order; nothing if it cannot be read."""
    count = 0
    for root, _, names in os.walk(folder):
        for name in names:
            if (count := count + 1) > _MAX_FILES:
                return
            yield Path(root, name)


def _in_ollama(organization: str | None, name: str, tag: str) -> Path | None:
    hosts = (_OLLAMA_LIBRARY,) if organization is None else (_OLLAMA_LIBRARY, *_HUB_HOSTS)
    for folder in ollama_folders():
        for host in hosts:
            manifest = folder / "manifests" / host / (organization or "library") / name / tag
            with contextlib.suppress(PermissionError):  # the service's folder may be closed to us
                if manifest.is_file() and (path := _weights(folder, manifest)) is not None:
                    return path
    return None


def _weights(folder: Path, manifest: Path) -> Path | None:
    """Return the file of the weights that a manifest names; None if it is no manifest of a model.

    Raises ValueError if the file is missing, or the model is an adapter on another one.
    """
    try:
        with manifest.open("rb") as file:
            layers = json.loads(file.read(_MAX_MANIFEST))["layers"]
        digests = {layer["mediaType"]: layer["digest"] for layer in layers}
    except (ValueError, KeyError, TypeError):
        return None
    if _WEIGHTS not in digests or not re.fullmatch(r"sha256:[0-9a-f]{64}", str(digests[_WEIGHTS])):
        return None
    path = folder / "blobs" / digests[_WEIGHTS].replace(":", "-")
    name = _ollama_name(manifest.parts[-4:])
    if _ADAPTER in digests:
        raise ValueError(
            f"model: {name} in Ollama's store is a LoRA adapter on another model: serve that one with --lora-modules"
        )
    if not path.is_file():
        raise ValueError(f"model: Ollama's store lacks {path}, the weights of {name}: run `ollama pull {name}`")
    return path


def _ollama_name(parts: tuple[str, ...]) -> str:
    """Return the name of the manifest HOST/ORG/NAME/TAG as `ollama list` shows it."""
    *place, name, tag = parts
    if place[:1] == [_OLLAMA_LIBRARY]:
        place = place[1:]
    return "/".join([*(part for part in place if part != "library"), f"{name}:{tag}"])


def _llama_cpp_files(repository: str) -> tuple[Path, dict[str, str]]:
    """Return (folder, names in the repository -> names in the folder); `/` became `_` in the latter."""
    folder, prefix = llama_cpp_folder(), repository.replace("/", "_") + "_"
    try:
        names = os.listdir(folder)
    except OSError:
        return folder, {}
    return folder, {name.removeprefix(prefix): name for name in gguf_names(sorted(names)) if name.startswith(prefix)}


def _lm_studio_files(repository: str) -> list[tuple[Path, dict[str, str]]]:
    found = []
    for root in lm_studio_folders():
        folder = root / repository
        names = [path.relative_to(folder).as_posix() for path in sorted(_files(folder))]
        found.append((folder, {name: name for name in gguf_names(names)}))
    return found


def _named_file(repository: str, name: str) -> Path | None:
    folder, names = _llama_cpp_files(repository)
    if (path := names.get(name.replace("/", "_"))) is not None:
        return folder / path
    for folder, names in _lm_studio_files(repository):
        if name in names:
            return folder / name
    return None
