"""Makes a model folder from a GGUF file: config.json, the tokenizer and its chat template from the file's metadata. The
weights stay in the file, which config.json names.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quire.checkpoints.gguf.generation import generation_config
from quire.checkpoints.gguf.header import GgufFile, read_gguf
from quire.checkpoints.gguf.model_config import model_config
from quire.checkpoints.gguf.modules import write_modules
from quire.checkpoints.gguf.names import IGNORED
from quire.checkpoints.reading import reading

logger = logging.getLogger("quire")

_QUANTIZATION = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<name>[\w.-]+)")
_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<path>.+\.gguf)")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_LATER_SHARD = re.compile(r"-0000[2-9]-of-|-000[1-9]\d-of-")
_VERSION = 8  # for the folder's contents
CONVERTING = "reading the GGUF file"  # a phase of the start
Progress = Callable[[str, float], None]


def hub_patterns(model: str) -> tuple[str, list[str]] | None:
    """Return (repository, patterns of the GGUF files to download) of `repo:Q4_K_M` or `repo/file.gguf`, else None."""
    if match := _FILE.fullmatch(model):
        return match["repo"], [re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", match["path"])]
    if match := _QUANTIZATION.fullmatch(model):
        return match["repo"], [f"*{match['name']}{end}" for end in (".gguf", "-*-of-*.gguf", "/*.gguf")]
    return None


def gguf_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(".gguf")]


def chosen_files(names: list[str], model: str) -> list[str]:
    """Return the GGUF file of a repository that `model` names; if it is sharded, all shards in order.

    Raises ValueError if there is none, or more than one, or a shard is missing.
    """
    chosen = chosen_file(names, model)
    if not (match := _SHARD.fullmatch(chosen)):
        return [chosen]
    shards = [f"{match['stem']}-{i:05}-of-{match['count']}.gguf" for i in range(1, int(match["count"]) + 1)]
    if missing := [name for name in shards if name not in names]:
        raise ValueError(f"model: {model} is incomplete: the repository lacks {', '.join(missing)}")
    return shards


def first_file(folder: str, model: str) -> str:
    """Return the downloaded file of `model`, or its first shard. Raises ValueError if there is none, or more
    than one.
    """
    names = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*.gguf"))]
    return str(Path(folder, chosen_file(names, model)))


def chosen_file(names: list[str], model: str) -> str:
    """Return the GGUF file of a repository that `model` names, or its first shard. Raises ValueError if there is none,
    or more than one.
    """
    if match := _FILE.fullmatch(model):
        if match["path"] not in names:
            have = ", ".join(names) or "no GGUF files"
            raise ValueError(f"model: {match['repo']} has no file {match['path']}; there are {have}")
        return match["path"]
    return chosen_in(names, _QUANTIZATION.fullmatch(model)["name"], model)


def chosen_in(names: list[str], quantization: str, model: str) -> str:
    """Return the one GGUF file of `names`, or its first shard, with this quantization. Raises ValueError, which names
    `model` and the files, if there is none or more than one.
    """
    found = quantized(names, quantization)
    if len(found) != 1:
        files = ", ".join(path.rpartition("/")[2] for path in found) or "none"
        kind = "folder" if os.path.isdir(model.rpartition(":")[0]) else "repository"
        have = "" if found else f"; there are {', '.join(names) or 'no GGUF files'}"
        raise ValueError(f"model: {model} must name one GGUF file of its {kind}; it names {files}{have}")
    return found[0]


def quantized(names: list[str], quantization: str) -> list[str]:
    """Return the first shards among `names` with this quantization, case-insensitive: those whose names end with
    it, else those whose names contain it.
    """
    name = quantization.lower()
    found = [path for path in names if name in path.lower() and is_first(path)]
    return [
        path for path in found if re.search(rf"(^|[-._/]){re.escape(name)}(\.gguf|-00001|/)", path.lower())
    ] or found


def is_first(path: str) -> bool:
    """Return whether a GGUF file can name its model: it is no later shard and no image projector."""
    return not _LATER_SHARD.search(path) and "mmproj" not in path


def made_folder(path: str) -> str | None:
    """Return the folder that `gguf_folder` made from the file `path` before, or None."""
    folder = _folder_of(path)
    return str(folder) if folder.is_dir() else None


def _folder_of(path: str) -> Path:
    path = os.path.abspath(path)
    status = os.stat(path)
    state = f"{_VERSION} {path} {status.st_size} {status.st_mtime_ns}"
    return cache_folder() / f"{Path(path).stem[:60]}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"


def gguf_folder(path: str, progress: Progress = lambda phase, fraction: None) -> str:
    """Return the folder of the model in the GGUF file `path`, made in the cache if it is not there yet. That takes
    seconds for a large vocabulary.

    Raises:
        ValueError: the file cannot be read, or its model or tokenizer is not supported.
    """
    folder = _folder_of(path)
    if folder.is_dir():
        return str(folder)
    progress(CONVERTING, 0.0)
    file = read_gguf(os.path.abspath(path))
    progress(CONVERTING, 0.2)
    try:
        write_folder(file, folder, progress)
    except OSError as error:
        return _temporary_folder(file, folder, error)
    return str(folder)


def _temporary_folder(file: GgufFile, folder: Path, error: OSError) -> str:
    """Return a folder for this run alone, because `error` prevents writing to the cache. Raises ValueError if no folder
    can be written.
    """
    remedy = "set QUIRE_CACHE to a folder with some MB of space"
    try:
        root = tempfile.mkdtemp(prefix="quire-gguf-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        write_folder(file, Path(root, folder.name))
    except OSError as other:
        raise ValueError(
            f"model: the tokenizer and settings of {file.path} can be written neither to {folder.parent} "
            f"({error.strerror}) nor to {tempfile.gettempdir()} ({other.strerror}): {remedy}"
        ) from None
    logger.warning(
        "cannot write to the cache %s: %s; using %s until the server ends: %s",
        folder.parent,
        error.strerror,
        root,
        remedy,
    )
    return os.path.join(root, folder.name)


def cache_folder() -> Path:
    """Return $QUIRE_CACHE/gguf, by default ~/.cache/quire/gguf."""
    root = os.environ.get("QUIRE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quire"
    )
    return Path(root) / "gguf"


def write_folder(file: GgufFile, folder: Path, progress: Progress = lambda phase, fraction: None) -> None:
    """Write the model's folder: config.json, the tokenizer, and generation_config.json."""
    from quire.checkpoints.gguf.tokenizer import tokenizer_files

    with reading(file.path, file.metadata):
        config = model_config(file, rope_factors(file))
        tokenizer = tokenizer_files(file.metadata)
    progress(CONVERTING, 0.8)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        for name, text in tokenizer.items():
            Path(draft, name).write_text(text, encoding="utf-8")
        _write_json(draft, "config.json", config)
        _write_json(draft, "generation_config.json", generation_config(file))
        write_modules(file, Path(draft))
        done = os.path.join(draft, "done")
        os.mkdir(done)
        for name in os.listdir(draft):
            if name != "done":
                os.rename(os.path.join(draft, name), os.path.join(done, name))
        try:
            os.rename(done, folder)
        except OSError:
            if not folder.is_dir():  # another process may have made it meanwhile
                raise


def _write_json(folder: str, name: str, content: dict[str, Any]) -> None:
    Path(folder, name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def rope_factors(file: GgufFile) -> dict[str, list[float]]:
    """Return the values of the tensors that scale rotary embeddings."""
    found = {}
    for name in IGNORED:
        if tensor := file.tensors.get(name):
            with open(tensor.path, "rb") as data:
                data.seek(tensor.start)
                found[name] = list(struct.unpack(f"<{tensor.size // 4}f", data.read(tensor.size)))
    return found
