"""The identity of a model's files, which copies on other machines share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.checkpoints.weight_summary import model_identity


def write(folder: Path, config: dict, **sizes: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, size in sizes.items():
        (folder / f"{name}.safetensors").write_bytes(bytes(size))
    return str(folder)


@pytest.mark.parametrize("other", [({"a": 2}, {"x": 3}), ({"a": 1}, {"x": 4}), ({"a": 1}, {"y": 3}), ({"a": 1}, {})])
def test_another_config_or_other_files_are_another_model(tmp_path, other):
    first = model_identity(write(tmp_path / "first", {"a": 1}, x=3))
    assert first == model_identity(write(tmp_path / "copy", {"a": 1}, x=3))
    config, sizes = other
    assert first != model_identity(write(tmp_path / "other", config, **sizes))


def test_weights_that_are_not_read_do_not_count(tmp_path):
    folders = [write(tmp_path / "with", {"a": 1}, x=3), write(tmp_path / "without", {"a": 1})]
    assert len({model_identity(folder, has_weights=False) for folder in folders}) == 1


def test_a_gguf_file_may_be_in_another_folder(tmp_path):
    found = []
    for name, size in (("a", 5), ("b", 5), ("c", 6)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "model.gguf"
        file.write_bytes(bytes(size))
        found.append(model_identity(write(tmp_path / f"of-{name}", {"quantization_config": {"file": str(file)}})))
    assert found[0] == found[1] != found[2]
