"""Copies of the adapters' files, which requests and new engines read: the originals may change or go once an adapter is
loaded. A copy is removed when nothing refers to it any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoints.lora import read_lora, require_adapter
from quire.checkpoints.lora_files import CONFIG, FILES, GGUF, WEIGHTS, LoraFiles, content_hash
from quire.checkpoints.lora_gguf import gguf_of
from quire.server.private_folder import make_folder, remove_abandoned

PREFIX = "quire-lora-"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """One adapter's files. `key` is the hash of their contents."""

    key: str
    files: LoraFiles

    @property
    def folder(self) -> str:
        return str(self.files.folder)


class Snapshots:
    """The copies, in a folder created with the first adapter. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._folder: Path | None = None
        self._mark: int | None = None

    def take(self, source: Path, link: bool = False) -> Snapshot:
        """Copy and check an adapter; `link` shares the files, which must not change, where the file system can do it.

        Raises ValueError with the fault.
        """
        require_adapter(source)
        copy = Path(tempfile.mkdtemp(dir=self._own_folder()))
        try:
            sources = {name: source / name for name in FILES[:2]} | {GGUF: gguf_of(source)}
            for name, path in sources.items():
                if path is not None and path.is_file():
                    (_link if link else shutil.copyfile)(path, copy / name)
            if not ((copy / GGUF).is_file() or ((copy / WEIGHTS).is_file() and (copy / CONFIG).is_file())):
                read_lora(source)  # names the other files
            files = read_lora(copy)
            snapshot = Snapshot(content_hash(copy), files)
        except OSError as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise ValueError(f"the adapter's files cannot be read: {error.strerror}") from None
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        weakref.finalize(snapshot, shutil.rmtree, str(copy), True)
        return snapshot

    def _own_folder(self) -> Path:
        with self._mutex:
            if self._folder is None:
                base = Path(tempfile.gettempdir())
                remove_abandoned(base, PREFIX)
                self._folder, self._mark = make_folder(base, PREFIX)
            return self._folder

    def close(self) -> None:
        """Remove everything. Idempotent."""
        with self._mutex:
            folder, self._folder = self._folder, None
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(self._mark)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # links are not supported
        shutil.copyfile(source, target)
