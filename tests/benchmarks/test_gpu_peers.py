"""The comparison with another server: what is sent, how servers are started, and the table."""

import json

import pytest

from benchmarks import gpu_peers
from benchmarks.gpu_models import MODELS, write_model
from quire.checkpoints.lora import read_lora
from quire.worker.models.registry import read_model_spec


@pytest.mark.parametrize("case", gpu_peers.CASES)
def test_cases_are_the_same_for_both_servers(case):
    bodies = gpu_peers.requests_of(case, 600, 0.1)
    assert bodies == gpu_peers.requests_of(case, 600, 0.1) and len(bodies) >= 1
    for body in bodies:
        assert (
            all(0 <= token < 600 for token in body["prompt"]) and body["max_tokens"] >= 2 and body["temperature"] == 0
        )
        assert ("ignore_eos" in body) == (case != "schema")
    assert {body["model"] for body in bodies} <= {"m", *(f"a{i}" for i in range(10))}
    assert gpu_peers._other_prompt(bodies[0])["prompt"] != bodies[0]["prompt"]


def test_adapters_fit_the_model(tmp_path):
    paths = gpu_peers.write_adapters(tmp_path, MODELS["tiny"])
    lora = read_lora(str(paths[3]))
    assert len(paths) == 10 and lora.rank == gpu_peers.RANK and len(lora.modules) == 2 * 2
    command = gpu_peers.command("vllm", tmp_path, ["adapters"], paths, False)
    assert "--enable-lora" in command and f"a9={paths[9]}" in command and command[0] == "vllm"
    drafts = gpu_peers.command("quire", tmp_path, ["drafts"], [], True)
    settings = json.loads(drafts[drafts.index("--speculative-config") + 1])
    assert settings["method"] == "ngram" and "cpu" in drafts


@pytest.mark.parametrize("name", ["Llama-3.1-8B-FP8", "Llama-3.1-8B-AWQ", "Qwen3-Next-12-layers"])
def test_models_are_read(name, tmp_path):
    spec = read_model_spec(str(write_model(name, tmp_path)))
    assert spec.implementation == "quire" and bool(spec.raw.get("quantization_config")) == ("Llama" in name)


def test_the_table_compares_what_both_have():
    line = {"model": "x", "first_ms": 1.0, "ms_per_token": 1.0}
    lines = [
        line | {"server": "quire", "case": "one", "tokens_per_second": 30.0},
        line | {"server": "vllm", "case": "one", "tokens_per_second": 20.0},
        line | {"server": "quire", "case": "long", "tokens_per_second": 30.0},
        {"server": "quire", "model": "x", "case": "ready one", "seconds": 10.0},
        {"server": "vllm", "model": "x", "case": "ready one", "seconds": 40.0},
    ]
    rows = gpu_peers.table(lines).splitlines()[2:]
    assert rows == ["| x | one | 30.0 | 20.0 | 1.50 |", "| x | ready one | 10.0 | 40.0 | 4.00 |"]
