"""Fetches the headers of a Hub model's weights by range requests. The files have full length, but only the header is
written (the rest is a hole), so that names, shapes and types can be read before the weights are downloaded.

huggingface_hub is imported only here and in `hub.py`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.checkpoints.gguf import folder as gguf_folder
from quire.checkpoints.gguf.header import header_length, read_gguf
from quire.checkpoints.gguf.names import IGNORED
from quire.checkpoints.safetensors import SINGLE, weight_names

_FIRST = 1 << 17  # bytes of the first request
_MOST = 1 << 28  # per header
_THREADS = 8


class HubFile:
    """A file of a Hub repository. Raises ValueError, with the Hub's reason, if it cannot be read."""

    def __init__(self, repository: str, name: str, revision: str | None):
        from huggingface_hub import hf_hub_url

        self.name, self.url = name, hf_hub_url(repository, name, revision=revision)
        self.size = 0  # known after the first request

    def read(self, start: int, length: int) -> bytes:
        """Return the bytes from `start` on, fewer at the end of the file."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers() | {"Range": f"bytes={start}-{start + length - 1}"}
        with get_session().stream("GET", self.url, headers=headers, timeout=30, follow_redirects=True) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:
                raise ValueError(f"the server of {self.name} sends whole files only, not the ranges asked for")
            self.size = int(response.headers["content-range"].rpartition("/")[2])
            return response.read()

    def copy_header(self, path: Path, length_of: Callable[[bytes], int | None]) -> None:
        """Write the file to `path` with only its first `length_of(beginning)` bytes; None: more are needed."""
        data = self.read(0, _FIRST)
        while (length := length_of(data)) is None or length > len(data):
            if len(data) >= min(_MOST, self.size):
                raise ValueError(f"{self.name} on the Hub is incomplete or damaged")
            data += self.read(len(data), max(len(data), (length or 0) - len(data)))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data[:length])
            file.truncate(self.size)


def are_complete(folder: str) -> bool:
    """Return whether the folder has all files of weights."""
    return all((Path(folder) / name).is_file() for name in _weight_files(Path(folder)))


def with_headers(folder: str, model: str, revision: str | None, target: Path) -> str:
    """Return a folder below `target` like the downloaded one, with the small files and the folders of `folder` and the
    headers of the weights.
    """
    for path in Path(folder).iterdir():
        os.symlink(path.resolve(), target / path.name)
    files = [HubFile(model, name, revision) for name in _weight_files(Path(folder))]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda file: file.copy_header(target / file.name, _safetensors_length), files))
    return str(target)


def gguf_with_header(repository: str, names: list[str], revision: str | None, target: Path) -> str:
    """Return the folder below `target` of the GGUF model with the shards `names`."""
    files = {name: HubFile(repository, name, revision) for name in names}
    for name, file in files.items():
        file.copy_header(target / "files" / name, header_length)
    parsed = read_gguf(target / "files" / names[0])
    for name in IGNORED:  # small tensors whose values config.json depends on
        if tensor := parsed.tensors.get(name):
            file = files[tensor.path.relative_to(target / "files").as_posix()]
            with tensor.path.open("r+b") as local:
                local.seek(tensor.start)
                local.write(file.read(tensor.start, tensor.size))
    gguf_folder.write_folder(parsed, target / "model")
    return str(target / "model")


def _weight_files(folder: Path) -> list[str]:
    return weight_names(folder) or [SINGLE]


def _safetensors_length(data: bytes) -> int | None:
    return 8 + struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else None
