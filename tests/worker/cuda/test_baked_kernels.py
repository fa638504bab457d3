"""Compiled kernels that an image brings are used beside those that a cache has."""

from __future__ import annotations

import re
from pathlib import Path

from quire.worker.cuda import install

ROOT = Path(__file__).parent.parent.parent.parent


def _kernel(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "kernel.cubin").write_text(text)


def test_the_cache_gets_what_it_lacks(tmp_path):
    baked, kept = tmp_path / "baked", tmp_path / "cache" / "triton"
    for name in ("A", "B"):
        _kernel(baked, name, "image")
    _kernel(kept, "B", "own")
    for _ in range(2):  # each start
        install.link_baked(baked, kept)
        assert {one.name: (one / "kernel.cubin").read_text() for one in kept.iterdir()} == {"A": "image", "B": "own"}


def test_links_to_an_older_image_are_replaced(tmp_path):
    baked, kept = tmp_path / "baked", tmp_path / "cache"
    _kernel(baked, "A", "new")
    kept.mkdir()
    (kept / "A").symlink_to(tmp_path / "gone")
    install.link_baked(baked, kept)
    assert (kept / "A" / "kernel.cubin").read_text() == "new"


def test_a_cache_that_cannot_be_written_is_said(tmp_path, caplog):
    _kernel(tmp_path / "baked", "A", "image")
    (tmp_path / "file").write_text("")
    install.link_baked(tmp_path / "baked", tmp_path / "file" / "cache")
    assert "compiled kernels in" in caplog.text and "are not used" in caplog.text


def test_without_baked_kernels_no_cache_is_made(tmp_path):
    install.link_baked(tmp_path / "none", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_image_compiles_into_the_folder_that_is_read():
    steps = (ROOT / "Dockerfile").read_text()
    (folder,) = re.findall(r"tools.compile_kernels --cache (\S+) ", steps)
    prefix = Path("/opt/quire")  # the image's environment
    assert prefix / install.BAKED.relative_to(install.sys.prefix) == Path(folder)
    assert "COPY --from=build-cuda /opt/quire /opt/quire" in steps
