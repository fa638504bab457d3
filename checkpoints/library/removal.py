"""Removes models of the Hub's cache and of packages, and the user's names; never files of another program."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from quire.checkpoints import packaged
from quire.checkpoints.gguf import folder as gguf_folder
from quire.checkpoints.library import aliases, installed, names, stores

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_REMEDY = {
    stores.OLLAMA: "`ollama rm` removes it",
    stores.LLAMA_CPP: "remove its files yourself",
    stores.LM_STUDIO: "remove it in LM Studio",
}


class NotHere(ValueError):
    """The model is not on this machine."""


def remove(model: str) -> tuple[str, int]:
    """Remove `model`. Returns (description of the removed item, its bytes). Raises ValueError, OSError."""
    if not os.path.exists(os.path.expanduser(model)) and aliases.remove(model):
        return f"the name {model}", 0
    found = names.located(model)
    if (program := stores.owner(found)) is not None:
        raise ValueError(f"{model} is in the store of {program}, which quire only reads: {_REMEDY[program]}")
    if os.path.exists(os.path.expanduser(found)):
        raise ValueError(f"{model} is a path, not a model that was downloaded by its name: remove it yourself")
    if found in packaged.MODELS and packaged.cached(found) is not None:
        folder = packaged.folder() / found
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
        return f"the package {found}", size
    return _remove_from_hub_cache(model, found)


def _remove_from_hub_cache(model: str, name: str) -> tuple[str, int]:
    named = gguf_folder.hub_patterns(name)
    repository = named[0] if named else name
    cached = next((one for one in installed.repositories() if one.repo_id == repository), None)
    if cached is None:
        raise NotHere(f"{model} is not on this machine: the Hub's cache {names.hub_cache()} has no {repository}")
    files = installed.gguf_files(cached)
    if named is None or set(files) == {chosen := gguf_folder.chosen_file(sorted(files), name)}:
        return f"{repository} from the Hub's cache", _remove_repository(cached)
    return f"{repository}/{chosen} from the Hub's cache", _remove_files(files[chosen])


def _remove_repository(repository: CachedRepoInfo) -> int:
    from huggingface_hub import scan_cache_dir

    hashes = [revision.commit_hash for revision in repository.revisions]
    # for this repository alone: a copy of it may have the same commits
    found = dataclasses.replace(scan_cache_dir(names.hub_cache()), repos=frozenset({repository}))
    strategy = found.delete_revisions(*hashes)
    strategy.execute()
    return strategy.expected_freed_size


def _remove_files(links: list[Path]) -> int:
    """Remove files of snapshots, and the blobs that they link to."""
    size = 0
    for link in links:
        blob = link.resolve()
        size += blob.stat().st_size if blob.is_file() else 0
        link.unlink()
        blob.unlink(missing_ok=True)
    return size
