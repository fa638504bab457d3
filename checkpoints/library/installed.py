"""The models on this machine: those of the Hub's cache and the packages, the user's names, other programs' stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints import packaged
from quire.checkpoints.gguf.folder import is_first
from quire.checkpoints.library import aliases, names, stores

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

HUB, PACKAGE = "Hub cache", "package"
_SHARD = re.compile(r"-00001-of-(\d{5})\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Installed:
    """A model of this machine. Commands take `name`; `modified` is in seconds since 1970."""

    name: str
    size: int
    modified: float
    source: str


def installed() -> list[Installed]:
    """Return all models of this machine, the latest first. Raises ValueError if the file of own names is damaged."""
    found = [*_hub_models(), *_packaged_models(), *_stored_models()]
    for name, entry in aliases.entries().items():
        known = next((one for one in found if one.name == entry.base), None)
        size, modified = (known.size, known.modified) if known else (0, aliases.path().stat().st_mtime)
        found.append(Installed(name, size, modified, f"{'name of' if entry.is_plain else 'made from'} {entry.base}"))
    return sorted(found, key=lambda one: (-one.modified, one.name))


def repositories() -> list[CachedRepoInfo]:
    """Return the models of the Hub's cache; none if there is no cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(names.hub_cache())
    except CacheNotFound:
        return []
    return [one for one in found.repos if one.repo_type == "model" and one.revisions]


def gguf_files(repository: CachedRepoInfo) -> dict[str, list[Path]]:
    """Return the name in the repository of each GGUF model, and its files in every revision, with all shards."""
    found: dict[str, list[Path]] = {}
    for revision in repository.revisions:
        paths = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
        for name in sorted(paths):
            if name.lower().endswith(".gguf") and is_first(name):
                stem = _SHARD.sub("", name)
                shards = [path for path in paths if path == name or (stem != name and path.startswith(f"{stem}-"))]
                found.setdefault(name, []).extend(paths[path].file_path for path in shards)
    return found


def _hub_models() -> Iterator[Installed]:
    for repository in repositories():
        files = gguf_files(repository)
        weights = [file for revision in repository.revisions for file in revision.files if not _is_gguf(file.file_name)]
        if any(file.file_name.endswith(".safetensors") for file in weights) or not files:
            size = sum({file.blob_path: file.size_on_disk for file in weights}.values())
            yield Installed(repository.repo_id, size, repository.last_modified, HUB)
        for name, paths in files.items():
            sizes = {path.resolve(): path.stat() for path in paths}
            modified = max(status.st_mtime for status in sizes.values())
            size = sum(status.st_size for status in sizes.values())
            yield Installed(f"{repository.repo_id}/{name}", size, modified, HUB)


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _packaged_models() -> Iterator[Installed]:
    for name in packaged.MODELS:
        if packaged.cached(name) is not None:
            files = [path.stat() for path in (packaged.folder() / name).rglob("*") if path.is_file()]
            modified = max((status.st_mtime for status in files), default=0.0)
            yield Installed(name, sum(status.st_size for status in files), modified, PACKAGE)


def _stored_models() -> Iterator[Installed]:
    for one in stores.stored():
        try:
            shards = [status.st_size for status in map(os.stat, _shards(one.path))]
            yield Installed(one.name, sum(shards), one.path.stat().st_mtime, one.source)
        except OSError:  # removed meanwhile by its program
            continue


def _shards(path: Path) -> list[Path]:
    stem = _SHARD.sub("", path.name)
    return [path] if stem == path.name else sorted(path.parent.glob(f"{stem}-*-of-*.gguf"))
