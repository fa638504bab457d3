"""A GGUF file is served although the cache cannot be written: full, read-only, or in the place of a file."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from quire.checkpoints.gguf import folder as gguf_folders
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_files import write_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    source = build_checkpoint("qwen3", folder / "source", num_hidden_layers=1)
    write_gguf(source, folder / "model.gguf", {"default": "F16"}, "qwen3")
    return str(folder / "model.gguf")


def test_a_cache_that_is_a_file(path, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        found = Path(gguf_folders.gguf_folder(path))
    assert (found / "config.json").is_file() and (found / "tokenizer.json").is_file()
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "QUIRE_CACHE" in caplog.text and str(found.parent) in caplog.text
    shutil.rmtree(found.parent)


def test_a_cache_that_is_full(path, tmp_path, monkeypatch, caplog):
    """Every write into it fails; nothing half written stays."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    write = Path.write_text

    def full(self: Path, *arguments, **options):
        if str(self).startswith(str(tmp_path / "cache")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with caplog.at_level(logging.WARNING):
        found = Path(gguf_folders.gguf_folder(path))
    assert (found / "config.json").is_file() and "No space left" in caplog.text
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    shutil.rmtree(found.parent)


def test_no_folder_at_all_is_one_line(path, tmp_path, monkeypatch):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_folders.tempfile, "tempdir", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="set QUIRE_CACHE to a folder") as caught:
        gguf_folders.gguf_folder(path)
    assert "\n" not in str(caught.value)
