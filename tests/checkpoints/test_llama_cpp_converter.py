"""Files that llama.cpp's own converter writes give the logits of the checkpoints that they were made of. Runs if
QUIRE_LLAMA_CPP names a folder of llama.cpp's source (it is in the sdist of llama-cpp-python: vendor/llama.cpp).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.checkpoints.gguf.folder import gguf_folder
from tests.checkpoints.test_gguf_families import CASES, IDS
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS, build_checkpoint
from tests.helpers.models.families import build_family
from tests.helpers.models.gguf_converter import known_width
from tests.worker.layers.test_stored_weights import load, logits_of

LLAMA_CPP = os.environ.get("QUIRE_LLAMA_CPP")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LLAMA_CPP is None, reason="needs QUIRE_LLAMA_CPP, a folder of llama.cpp's source"),
]
# keys of published config.json files that our checkpoints do not have
PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "falcon_h1-gate-first": {"head_dim": 16},
    "gpt2": {"n_ctx": 2048},
    "solar_open": {"partial_rotary_factor": 1.0},
}
# whose config.json is too different from the published ones, or has values that files do not have
NOT_CONVERTED = {
    "bailing_hybrid", "deepseek-v3", "gemma3", "gemma3n", "gemma4", "gemma4-experts", "gemma4-k-is-v",
    "granite4-mamba", "granite4-mamba-experts", "granite_swa", "hunyuan-moe", "kimi_linear", "minimax-m2",
    "ministral3", "mistral4", "nemotron_h", "olmoe", "starcoder2",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_CONVERTED])
def test_logits_are_those_of_the_checkpoint(name, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")
    build = build_checkpoint if name in MOE_CHECKPOINTS | CHECKPOINTS else build_family
    source = build(name, tmp_path / "source", **CASES[name][1])
    path = Path(source, "config.json")
    config = json.loads(path.read_text()) | PUBLISHED.get(name, {})
    if not known_width(config):
        config.pop("intermediate_size", None)
    path.write_text(json.dumps(config))
    file = tmp_path / "model.gguf"
    command = [sys.executable, "-m", "tests.helpers.models.llama_cpp_convert", LLAMA_CPP, source, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    mine, theirs = (logits_of(load(folder), IDS) for folder in (gguf_folder(str(file)), source))
    torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-3)
