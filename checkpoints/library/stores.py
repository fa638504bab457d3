"""The models that Ollama, llama.cpp and LM Studio keep on this machine. Their folders are only read."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoints.gguf.folder import gguf_names, is_first, quantized
from quire.checkpoints.library import ollama_store

OLLAMA, LLAMA_CPP, LM_STUDIO = "Ollama", "llama.cpp", "LM Studio"
_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<path>.+\.gguf)", re.IGNORECASE)
_MAX_FILES = 10_000  # per store, so that a wrong variable (LLAMA_CACHE=/) does not walk the whole disk


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in another program's store, under the name that `quire serve` takes; `path` is its first GGUF file."""

    name: str
    path: Path
    source: str


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
    if not (match := ollama_store.NAME.fullmatch(name)):
        return None
    if (model := ollama_store.find(name)) is not None:
        return model.weights
    if match["org"] is None:
        return None
    repository = f"{match['org']}/{match['name']}"
    for folder, names in ((_llama_cpp_files(repository)), *_lm_studio_files(repository)):
        found = quantized(list(names), match["tag"]) if match["tag"] else [n for n in names if is_first(n)]
        if len(found) == 1:
            return folder / names[found[0]]
    return None


def stored() -> Iterator[Stored]:
    """Yield every readable model of the stores."""
    for folder in ollama_store.folders():
        for manifest in sorted(_files(folder / "manifests")):
            with contextlib.suppress(ValueError):  # damaged: `quire show` has the reason
                if (model := ollama_store.read(folder, manifest)) is not None:
                    yield Stored(model.name, model.weights, OLLAMA)
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
    places = [(folder, OLLAMA) for folder in ollama_store.folders()]
    places += [(llama_cpp_folder(), LLAMA_CPP), *((folder, LM_STUDIO) for folder in lm_studio_folders())]
    absolute = Path(os.path.abspath(path))
    return next((program for folder, program in places if absolute.is_relative_to(folder.absolute())), None)


def places() -> str:
    """Return the folders of the stores, for a message."""
    return (
        f"{OLLAMA}'s models ({', '.join(map(str, ollama_store.folders()))}), {LLAMA_CPP}'s ({llama_cpp_folder()}) and "
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
