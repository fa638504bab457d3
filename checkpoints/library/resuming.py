"""Downloads large files of the Hub to its cache so that an interrupted download continues: huggingface_hub itself
begins such a file anew. Small files, and the links of a snapshot, are left to `snapshot_download`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LARGE = 16 << 20  # minimum bytes of a file that is downloaded here
MAX_BYTES = 50_000_000_000  # the Hub serves larger files only in another way
NUM_THREADS = 4  # files at once
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch_large(
    repository: str,
    revision: str | None,
    cache: str | None,
    sizes: Mapping[str, int],
    arrived: Callable[[int], None],
) -> int:
    """Download the large files among `sizes`, name -> bytes, as blobs of the cache. Returns their bytes. `arrived` gets
    the bytes that have arrived so far. Raises the errors of huggingface_hub.
    """
    large = [name for name, size in sizes.items() if LARGE <= size < MAX_BYTES]
    count, lock, ended = 0, threading.Lock(), threading.Event()

    def add(num_bytes: int) -> None:
        nonlocal count
        if ended.is_set():
            raise InterruptedError("the download was ended")
        with lock:
            count += num_bytes
            arrived(count)

    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="download")
    try:
        for done in [pool.submit(_fetch, repository, revision, cache, name, add) for name in large]:
            done.result()
    finally:
        ended.set()  # by Ctrl-C, or an error of another file: threads end with their next bytes
        pool.shutdown(wait=False, cancel_futures=True)
    return sum(sizes[name] for name in large)


def _fetch(repository: str, revision: str | None, cache: str | None, name: str, add: Callable[[int], None]) -> None:
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get, repo_folder_name

    url = hub.hf_hub_url(repository, name, revision=revision)
    found = hub.get_hf_file_metadata(url)
    if found.etag is None or found.size is None:
        return
    folder = Path(cache or constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"), "blobs")
    folder.mkdir(parents=True, exist_ok=True)
    blob, part = folder / found.etag, folder / f"{found.etag}.part"
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may download the same
        begin = file.tell() if os.path.exists(part) else 0
        if blob.exists():
            add(found.size)
            part.unlink(missing_ok=True)
            return
        if begin > found.size:
            file.truncate(begin := 0)
        add(begin)
        http_get(
            url,
            file,
            resume_size=begin,
            headers=hub.utils.build_hf_headers(),
            expected_size=found.size,
            tqdm_class=_counting(add),
        )
        file.flush()
        if begin and _SHA256.fullmatch(found.etag) and _digest(part) != found.etag:
            part.unlink()
            raise OSError(f"{name} was damaged: what an earlier download had left does not fit; download it again")
        part.replace(blob)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _counting(add: Callable[[int], None]) -> type:
    """Return a silent tqdm that passes each step to `add`."""
    from huggingface_hub.utils import tqdm

    class Counting(tqdm):
        def __init__(self, *args: object, **kwargs: object):
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            add(int(n or 0))

    return Counting
