"""Preprocessed images in shared memory: which stay, which go, and what is left behind."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from quire.server.errors import Unavailable
from quire.server.media.processor import ProcessedImage
from quire.server.media.store import PREFIX, MediaStore
from quire.server.private_folder import remove_abandoned

SIZE = 1000  # bytes of pixels; a file has a header, too


def processed(seed: int = 0, size: int = SIZE) -> ProcessedImage:
    return ProcessedImage({"pixel_values": np.full(size, seed % 256, np.uint8)}, "<image>", [4])


@pytest.fixture
def store(tmp_path) -> MediaStore:
    store = MediaStore(4 * (SIZE + 200), tmp_path)
    yield store
    store.close()


def files(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob(f"{PREFIX}*/*.safetensors"))


def test_the_least_recently_used_makes_room(store, tmp_path):
    for name in "abcd":
        store.add(name, processed()).release()
    assert files(tmp_path) == list("abcd")
    store.lease("a").release()
    store.add("e", processed()).release()
    assert files(tmp_path) == list("acde") and store.lease("b") is None
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= store.max_bytes


def test_held_images_stay(store, tmp_path):
    leases = [store.add(name, processed()) for name in "abcd"]
    with pytest.raises(Unavailable, match="--mm-processor-cache-gb"):
        store.add("e", processed())
    assert files(tmp_path) == list("abcd")
    leases[1].release()
    leases[1].release()  # idempotent
    store.add("e", processed())
    assert files(tmp_path) == list("acde")
    del leases
    gc.collect()  # leases that nobody holds have ended
    store.add("f", processed(size=3 * SIZE)).release()
    assert "f" in files(tmp_path)


def test_nothing_is_kept_beyond_requests(tmp_path):
    store = MediaStore(4 * SIZE, tmp_path, keeps=False)
    leases = [store.add("a", processed()), store.lease("a"), store.add("b", processed())]
    leases[0].release()
    assert files(tmp_path) == ["a", "b"]
    leases[1].release()
    assert files(tmp_path) == ["b"] and store.lease("a") is None
    del leases
    gc.collect()
    assert files(tmp_path) == [] and store.num_bytes == 0
    store.close()


def test_an_image_larger_than_all_room(store, tmp_path):
    with pytest.raises(ValueError, match="--mm-processor-cache-gb"):
        store.add("a", processed(size=10 * SIZE))
    assert files(tmp_path) == [] and store.num_bytes == 0


def test_two_threads_that_add_the_same_image(store, tmp_path):
    leases = [store.add("a", processed()) for _ in range(2)]
    assert leases[0].medium is leases[1].medium and files(tmp_path) == ["a"]
    leases[0].release()
    for name in "bcde":
        store.add(name, processed()).release()
    assert store.lease("a") is not None  # the second one holds it


def test_threads(store, tmp_path):
    """Whatever they add and release, the files are those that the store counts, and complete."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                name = rng.choice("abcdefgh")
                try:
                    lease = store.lease(name) or store.add(name, processed(ord(name), rng.choice([100, SIZE])))
                except Unavailable:
                    continue
                assert (load_file(lease.medium.parts[0].path)["pixel_values"] == ord(name)).all()
                lease.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= store.max_bytes


def test_the_folder_is_for_this_user_and_goes_with_the_store(store, tmp_path):
    path = Path(store.add("a", processed()).medium.parts[0].path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unavailable, match="shutting down"):
        store.add("b", processed())


def test_folders_of_processes_that_were_killed_are_removed(store, tmp_path):
    """Those of living ones are not."""
    store.add("a", processed())
    script = (
        "import os, sys, numpy\n"
        "from pathlib import Path\n"
        "from quire.server.media.processor import ProcessedImage\n"
        "from quire.server.media.store import MediaStore\n"
        f"store = MediaStore(10**6, Path({str(tmp_path)!r}))\n"
        "store.add('dead', ProcessedImage({'x': numpy.zeros(3)}, '', []))\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert files(tmp_path) == ["a", "dead"]
    remove_abandoned(tmp_path, PREFIX)
    assert files(tmp_path) == ["a"]
    (tmp_path / f"{PREFIX}link").symlink_to(os.devnull)
    (tmp_path / f"{PREFIX}file").write_text("")
    remove_abandoned(tmp_path, PREFIX)
    assert files(tmp_path) == ["a"]
