"""The time steps of Nemotron-H and Zamba 2 have the bounds of `time_step_limit`, which GGUF files do not have: none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.gguf.folder import gguf_folder
from tests.checkpoints.test_gguf_families import CASES, IDS, reference
from tests.helpers.models.families import build_family
from tests.helpers.models.gguf_converter import Converter, common
from tests.worker.layers.test_stored_weights import load, logits_of

LIMITS = {"none": {}, "bounds": {"time_step_limit": (0.01, 0.02)}}


def with_short_steps(name: str, folder: Path, **settings: Any) -> str:
    """Write a checkpoint most of whose time steps are shorter than 0.001, the default of `time_step_min`."""
    source = build_family(name, folder, **settings)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    found = [key for key in tensors if key.endswith("dt_bias")]
    assert found
    tensors |= {key: tensors[key] - 9 for key in found}
    # without the residual's weight the scan decides
    tensors |= {key: value * 0 for key, value in tensors.items() if key.endswith(".D")}
    save_file(tensors, path, {"format": "pt"})
    return source


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-experts", "zamba2"])
@pytest.mark.parametrize("limit", LIMITS)
def test_bounds_are_those_of_the_config(name, limit, tmp_path):
    source = with_short_steps(name, tmp_path / "source", **LIMITS[limit])
    expected = reference(source)
    assert torch.allclose(logits_of(load(source), IDS), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h-experts"])
def test_gguf_files_have_none(name, tmp_path):
    arch, sizes, keys = CASES[name]
    source = with_short_steps(name, tmp_path / "source", **sizes)
    converter = Converter(source, tmp_path / "model.gguf", arch, {"default": "F32"})
    converter.run(common(converter.config) | keys(converter.config))
    folder = gguf_folder(str(tmp_path / "model.gguf"))
    assert torch.allclose(logits_of(load(folder), IDS), reference(source), atol=2e-3, rtol=2e-3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")
