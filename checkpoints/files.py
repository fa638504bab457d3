"""One-line explanations of unreadable model files and their remedies. Torch-free."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

GIT_LFS = b"version https://git-lfs"
GGUF = b"GGUF"
_WANTED = "give the folder of a model with its config.json, tokenizer and safetensors files"
_OTHER_WEIGHTS = re.compile(
    r"(pytorch_model|model|consolidated|tf_model|flax_model)[\w.-]*\.(bin|pth?|h5|msgpack|onnx)"
)
_POINTER = (
    "{} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder, or download the file again"
)


def denied(path: str | os.PathLike) -> str:
    """Return why `path` cannot be read: its permissions and our user id."""
    try:
        status = os.stat(path)
        theirs = f"{stat.filemode(status.st_mode)}, of user {status.st_uid} and group {status.st_gid}"
    except OSError:
        theirs = "no permission to enter a folder above it"
    return f"cannot read {path}: permission denied ({theirs}; quire runs as user {os.geteuid()})"


def unreadable(path: str | os.PathLike, error: OSError) -> str:
    """Return the operating system's reason why `path` cannot be read."""
    return denied(path) if isinstance(error, PermissionError) else f"cannot read {path}: {error.strerror or error}"


def damaged_weights(path: Path, error: Exception) -> str:
    """Return why `path` could not be read as safetensors. Permissions are checked first: the library reports them
    wrongly.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(GIT_LFS))
    except FileNotFoundError:
        return f"there is no file {path}, but the index of the weights names it: download the model again"
    except OSError as reason:
        return unreadable(path, reason)
    if head == GIT_LFS:
        return _POINTER.format(path)
    if head.startswith(GGUF):
        return f"{path} is a GGUF file under another name: rename it to end in .gguf, and give the file as the model"
    return f"cannot read the weights in {path}: {error}. The file is incomplete or damaged: download it again"


def folder_obstacle(path: str | os.PathLike) -> str | None:
    """Return why a folder, with those above it, cannot be made or written; None if it can. Makes nothing."""
    above = os.path.abspath(path)
    while not os.path.exists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        return os.strerror(errno.ENOTDIR)
    return None if os.access(above, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def file_obstacle(path: str | os.PathLike) -> str | None:
    """Return why a file cannot be made or written in a folder that exists; None if it can. Makes nothing."""
    if os.path.isdir(path):
        return os.strerror(errno.EISDIR)
    if os.path.exists(path):
        return None if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.stat(folder)
    except OSError as error:
        return error.strerror
    return folder_obstacle(folder)


def check_model_folder(folder: str, needs_weights: bool = True) -> None:
    """Raise ValueError with one line if `folder` is not a readable model: a file cannot be read, there is no
    config.json or, with `needs_weights`, the weights are in other files than safetensors.

    Called before any process is started and any large library is imported.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ValueError(f"model: {unreadable(folder, error)}") from None
    if "config.json" not in names:
        raise ValueError(f"model: {_no_config(folder, names)}")
    check_readable(folder)
    others = [name for name in names if _OTHER_WEIGHTS.fullmatch(name)]
    if needs_weights and others and not any(name.endswith(".safetensors") for name in names):
        raise ValueError(
            f"model: the weights in {folder} are in {', '.join(others[:3])}, which is not supported; give a model with "
            "safetensors, or convert it: transformers' save_pretrained writes them"
        )


def check_readable(folder: str, setting: str = "model") -> None:
    """Raise ValueError naming the first configuration or tokenizer file in `folder` that cannot be read.

    `setting` is the setting that named the folder.
    """
    try:
        for name in sorted(os.listdir(folder)):
            if name.endswith((".json", ".jinja", ".txt", ".model")):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    if file.read(len(GIT_LFS)) == GIT_LFS:
                        raise ValueError(f"{setting}: {_POINTER.format(path)}")
    except IsADirectoryError:
        raise ValueError(f"{setting}: {path} is a folder, but should be a file") from None
    except OSError as error:
        raise ValueError(f"{setting}: {unreadable(error.filename or folder, error)}") from None


def _no_config(folder: str, names: list[str]) -> str:
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return f"{folder} contains GGUF files and no config.json; give one of the files, e.g. {folder}/{gguf[0]}"
    if "gguf" in folder.lower():  # the name of a Hub repository: its GGUF files are not downloaded
        return (
            f"{folder} contains no config.json; of a repository of GGUF files, give one file, e.g. "
            "ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf"
        )
    if not names:
        return f"the folder {folder} is empty; {_WANTED}"
    found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"there is no config.json in {folder} (found {found}); {_WANTED}"
