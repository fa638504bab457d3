"""Files that llama.cpp's own converter writes give the logits of the checkpoints that they were made of. Runs if
QUIRE_LLAMA_CPP names a folder of llama.cpp's source (it is in the sdist of llama-cpp-python: vendor/llama.cpp).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.gguf.folder import gguf_folder
from tests.checkpoints.test_gguf_families import CASES, IDS
from tests.checkpoints.test_gguf_gated import CASES as GATED_CASES
from tests.checkpoints.test_gguf_gated import DOTS3_SIZES
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS, build_checkpoint
from tests.helpers.models.families import FAMILIES, build_family
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
    check_logits(converted(source, tmp_path), source)


def converted(source: str, tmp_path: Path) -> str:
    """Return the folder of the file that llama.cpp's converter writes."""
    file = tmp_path / "model.gguf"
    command = [sys.executable, "-m", "tests.helpers.models.llama_cpp_convert", LLAMA_CPP, source, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return gguf_folder(str(file))


def check_logits(*folders: str) -> None:
    mine, theirs = (logits_of(load(folder), IDS) for folder in folders)
    torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-3)


# what published config.json files have, and transformers' do not
GATED: dict[str, dict[str, Any]] = {"laguna": {}, "laguna-entries": {"sliding_window": None}, "hy_v4": {}}
GATED["dots3_note"] = DOTS3_SIZES | {
    "model_type": "dots3_note_published",  # so that transformers does not rewrite the sizes
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "per_layer_config": None,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "apply_mla_qkv_lora_rescale": True,
    "sliding_window_size": 24,
    "rope_parameters": None,
    "rope_theta": 8e7,
    "swa_rope_theta": 5e4,
    "swa_qk_rope_head_dim": 8,
    **{key: value for key, value in FAMILIES["dots3_note"][1].items() if key.startswith("swa_")},
    **{key: value for key, value in DOTS3_SIZES.items() if key.startswith("swa_")},
}


@pytest.mark.parametrize("name", GATED)
def test_logits_of_families_with_a_gate(name, tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")
    source = build_family(name, tmp_path / "source", **GATED_CASES[name][1])
    path, weights = Path(source, "config.json"), Path(source, "model.safetensors")
    if name == "hy_v4":  # transformers writes other names than published files have
        renamed = {re.sub(r"\.hc_pre\.(hc_\w+)\.", _published, name): t for name, t in load_file(weights).items()}
        save_file(renamed, weights, {"format": "pt"})
    config = path.read_text()
    path.write_text(json.dumps(json.loads(config) | GATED[name]))
    folder = converted(source, tmp_path)
    path.write_text(config)
    check_logits(folder, source)


def _published(match: re.Match[str]) -> str:
    return f".{match[1]}." if match[1] == "hc_head" else f".{match[1]}.hc_pre."
