"""What is wrong with a file of a model that cannot be read, in one line that says what to do. Torch-free."""

from __future__ import annotations

import os
import stat
from pathlib import Path

GIT_LFS = b"version https://git-lfs"
GGUF = b"GGUF"
_WANTED = "give the folder of a model with its config.json, tokenizer and safetensors files"
_POINTER = (
    "{} is a pointer of Git LFS and not the file itself: run `git lfs pull` in its folder, or download the file again"
)


def denied(path: str | os.PathLike) -> str:
    """`path` may not be read: its permissions, and who we are."""
    try:
        status = os.stat(path)
        theirs = f"{stat.filemode(status.st_mode)}, of user {status.st_uid} and group {status.st_gid}"
    except OSError:
        theirs = "a folder above it may not be entered"
    return f"cannot read {path}: permission denied ({theirs}; quire runs as user {os.geteuid()})"


def unreadable(path: str | os.PathLike, error: OSError) -> str:
    """What the system said about `path`."""
    return denied(path) if isinstance(error, PermissionError) else f"cannot read {path}: {error.strerror or error}"


def damaged_weights(path: Path, error: Exception) -> str:
    """Why `path` could not be read as safetensors. For a file without permission the library names a wrong reason."""
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
        return f"{path} is a GGUF file, which is not supported yet: download the model's safetensors files"
    return f"cannot read the weights in {path}: {error}. The file is incomplete or damaged: download it again"


def check_model_folder(folder: str) -> None:
    """Raise ValueError, in one line, when `folder` cannot be a model's: it or a file in it cannot be read, or there is
    no config.json.

    Runs before any process is started or library is imported that the model would need.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ValueError(f"model: {unreadable(folder, error)}") from None
    if "config.json" not in names:
        raise ValueError(f"model: {_no_config(folder, names)}")
    check_readable(folder)


def check_readable(folder: str, setting: str = "model") -> None:
    """Raise ValueError naming the first file of configuration or tokenizer in `folder` that cannot be read in full.

    `setting` is what named the folder.
    """
    try:
        for name in sorted(os.listdir(folder)):
            if name.endswith((".json", ".jinja", ".txt", ".model")):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    if file.read(len(GIT_LFS)) == GIT_LFS:
                        raise ValueError(f"{setting}: {_POINTER.format(path)}")
    except IsADirectoryError:
        raise ValueError(f"{setting}: {path} is a folder and should be a file") from None
    except OSError as error:
        raise ValueError(f"{setting}: {unreadable(error.filename or folder, error)}") from None


def _no_config(folder: str, names: list[str]) -> str:
    gguf = [name for name in names if name.endswith(".gguf")]
    if (
        gguf or "gguf" in folder.lower()
    ):  # of a repository on the Hub, GGUF files are not downloaded: its name is what tells
        return (
            f"{folder} holds {gguf[0] if gguf else 'no config.json'}, and GGUF is not supported yet; "
            "give the original model, with its config.json, tokenizer and safetensors files"
        )
    if not names:
        return f"the folder {folder} is empty; {_WANTED}"
    found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"there is no config.json in {folder} (found {found}); {_WANTED}"
