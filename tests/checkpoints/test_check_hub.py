"""`quire check` of a Hub model: the whole check, from headers alone, in a process that talks to a local Hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from quire.checkpoints.gguf.header import read_gguf
from quire.checkpoints.headers import HubFile
from quire.checkpoints.weight_summary import describe_format
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.server.fake_hub import FakeHub
from tests.helpers.worker import quantized_checkpoints as make

SIZES = {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 3, "head_dim": 64}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    build_checkpoint("qwen3", folder / "plain", sharded=True, dtype="bfloat16", **SIZES)
    settings = {"num_bits": 4, "strategy": "group", "group_size": 128}
    source = build_checkpoint("qwen3", folder / "source", **SIZES)
    make.write(source, folder / "made", *make.compressed_tensors("pack-quantized", **settings))
    (folder / "files").mkdir()
    write_gguf(source, folder / "files" / "model-Q8_0.gguf", {"default": "Q8_0"}, "qwen3")
    write_gguf(source, folder / "files" / "model-Q4_K_M.gguf", {"default": "Q4_K"}, "qwen3")
    (folder / "shards" / "Q5_0").mkdir(parents=True)
    write_gguf(source, folder / "shards" / "Q5_0" / "m-Q5_0.gguf", {"default": "Q5_0"}, "qwen3", tensors_per_shard=20)
    write_gguf(source, folder / "shards" / "m-F16.gguf", {"default": "F16"}, "qwen3")
    return {
        "org/shards-GGUF": str(folder / "shards"),
        "org/plain": str(folder / "plain"),
        "org/w4a16": str(folder / "made" / "quantized"),
        "org/model-GGUF": str(folder / "files"),
    }


_PROGRAM = """
import sys
from quire.cli.main import main
for model in sys.argv[1:]:
    print(f"{model}: {main(['check', model, '--device', 'cpu', '--log-level', 'error'])}", file=sys.stderr)
    print("----")
"""


def check(hub: FakeHub, cache: Path, *models: str) -> tuple[list[str], str]:
    """(the output for each model, all errors, with the exit status of each)."""
    variables = {**os.environ, **hub.environment(cache), "QUIRE_CACHE": str(cache / "quire")}
    command = [sys.executable, "-c", _PROGRAM, *models]
    result = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    return result.stdout.split("----\n")[:-1], result.stderr


LINES = {
    "org/plain": r"checkpoint: bfloat16, [\d.]+ MiB in \d+ files, 16\.00 bits per weight",
    "org/w4a16": r"checkpoint: compressed-tensors pack-quantized \(4-bit int, groups of 128\), [\d.]+ MiB in 1 file",
    "org/shards-GGUF:q5_0": r"checkpoint: GGUF, [\d.]+ MiB in 2 files, 5\.5\d bits per weight .*Q5_0 9\d\.\d %",
    "org/model-GGUF:Q4_K_M": r"checkpoint: GGUF, [\d.]+ MiB in 1 file, 4\.5\d bits per weight .*Q4_K 9\d\.\d %",
    "org/model-GGUF/model-Q8_0.gguf": r"checkpoint: GGUF, [\d.]+ MiB in 1 file, 8\.5\d bits per weight",
}


@pytest.mark.slow
def test_headers_suffice(repositories, tmp_path):
    with FakeHub(repositories).running() as hub:
        outputs, errors = check(hub, tmp_path, *LINES)
        assert errors.splitlines() == [f"{model}: 0" for model in LINES]
        for output, line in zip(outputs, LINES.values(), strict=True):
            assert re.match(line, output), output
            assert "memory of cpu" in output and "chat template: yes" in output
        assert not [name for name in hub.sent if "F16" in name]
        files = [path for folder in repositories.values() for path in Path(folder).rglob("*") if "F16" not in path.name]
        hub.sent = Counter({Path(name).name: count for name, count in hub.sent.items()})
        sizes = {path.name: path.stat().st_size for path in files if path.suffix in (".safetensors", ".gguf")}
        assert sum(hub.sent[name] for name in sizes) < sum(sizes.values()) / 3
        assert all(0 < hub.sent[name] <= 1 << 18 for name in sizes)
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.gguf"))


def resolved(hub: FakeHub, cache: Path, *models: str, **variables: str) -> list[str]:
    """The folder of each model as `quire serve` finds it, or why there is none."""
    program = """
import sys
from quire.checkpoints.hub import resolve
for model in sys.argv[1:]:
    try:
        print(resolve(model))
    except ValueError as error:
        print(error)
"""
    found = {**os.environ, **hub.environment(cache), "QUIRE_CACHE": str(cache / "quire"), **variables}
    command = [sys.executable, "-c", program, *models]
    return subprocess.run(command, capture_output=True, text=True, env=found, check=True).stdout.splitlines()


@pytest.mark.slow
def test_files_are_downloaded_by_name(repositories, tmp_path):
    """Whatever the case of the name; only the files of the one model; and found in the cache without a Hub."""
    named = ["org/shards-GGUF:q5_0", "org/shards-GGUF/Q5_0/m-Q5_0-00001-of-00002.gguf"]
    with FakeHub(repositories).running() as hub:
        first, second, none, nowhere = resolved(hub, tmp_path, *named, "org/shards-GGUF:Q3", "org/none:Q4_0")
        assert first == second and Path(first, "config.json").is_file()
        assert {Path(name).name for name in hub.sent} == {f"m-Q5_0-0000{i}-of-00002.gguf" for i in (1, 2)}
        weights = read_gguf(json.loads(Path(first, "config.json").read_text())["quantization_config"]["file"])
        assert len({tensor.path for tensor in weights.tensors.values()}) == 2  # found through the links of the cache
        assert none.startswith("model: org/shards-GGUF:Q3 must name one GGUF file of its repository; it names none;")
        assert none.endswith("there are Q5_0/m-Q5_0-00001-of-00002.gguf, Q5_0/m-Q5_0-00002-of-00002.gguf, m-F16.gguf")
        assert "no such model on the Hugging Face Hub (a private one needs HF_TOKEN)" in nowhere
    offline, missing = resolved(hub, tmp_path, "org/shards-GGUF:Q5_0", "org/other:Q5_0", HF_HUB_OFFLINE="1")
    assert offline == first and "it is not in the Hugging Face cache, and HF_HUB_OFFLINE is set" in missing
    assert not any(variable in missing for variable in ("Error", "Errno"))
    gone, missing = resolved(hub, tmp_path, "org/shards-GGUF:Q5_0", "org/other:Q5_0")
    assert gone == first and "it is not in the Hugging Face cache, and the Hub cannot be reached" in missing


@pytest.mark.slow
def test_an_id_without_a_quantization_is_q4_k_m_or_the_only_file(repositories, tmp_path):
    """As for Ollama and llama.cpp, by every spelling; and without a Hub from then on."""
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "m-F16.gguf").write_bytes(Path(repositories["org/shards-GGUF"], "m-F16.gguf").read_bytes())
    spelled = ["org/model-GGUF", "hf.co/org/model-GGUF", "huggingface.co/org/model-GGUF:q4_k_m", "org/only-GGUF"]
    with FakeHub(repositories | {"org/only-GGUF": str(tmp_path / "only")}).running() as hub:
        first, *others, only = resolved(hub, tmp_path / "hub", *spelled)
        assert Path(first, "config.json").is_file() and set(others) == {first} and Path(only, "config.json").is_file()
        assert set(hub.sent) == {"model-Q4_K_M.gguf", "m-F16.gguf"}
        outputs, errors = check(hub, tmp_path / "other", "hf.co/org/model-GGUF")
        assert "hf.co/org/model-GGUF: 0" in errors and re.match(LINES["org/model-GGUF:Q4_K_M"], outputs[0])
    assert resolved(hub, tmp_path / "hub", *spelled, HF_HUB_OFFLINE="1") == [first, first, first, only]


@pytest.mark.slow
def test_what_serving_would_refuse_is_refused_before_the_download(repositories, tmp_path):
    folder = tmp_path / "wrong"
    folder.mkdir()
    for path in Path(repositories["org/w4a16"]).iterdir():
        (folder / path.name).write_bytes(path.read_bytes().replace(b'"group_size": 128', b'"group_size": 64'))
    with FakeHub({"org/wrong": str(folder)}).running() as hub:
        _, errors = check(hub, tmp_path / "cache", "org/wrong", "org/none")
        assert "the weights in org/wrong do not fit Qwen3ForCausalLM; wrong shape or type: model" in errors
        assert "weight_scale is [128, 2], expected [128, 4]" in errors and "org/wrong: 1" in errors
        assert "no such model on the Hugging Face Hub" in errors and "org/none: 1" in errors


REFUSED = {"org/gated": (403, "GatedRepo"), "org/private": (401, "RepoNotFound"), "org/bare": (401, "")}


@pytest.mark.slow
def test_why_a_model_cannot_be_had(repositories, tmp_path):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (pickled / name).write_text("{}")
    expected = {
        "org/gated": "org/gated is gated: accept its conditions at ",
        "org/private": "no such model on the Hugging Face Hub (a private one needs HF_TOKEN)",
        "org/private:Q4_0": "no such model on the Hugging Face Hub (a private one needs HF_TOKEN)",
        "org/bare": "the Hugging Face Hub refuses org/bare (401): set HF_TOKEN to a token that may read it",
        "org/shards-GGUF": "org/shards-GGUF has GGUF files: name one by its quantization (org/shards-GGUF:Q4_K_M)",
        "org/pickled": "org/pickled has no safetensors, which are needed, but pytorch_model.bin",
    }
    with FakeHub(repositories | {"org/pickled": str(pickled)}, refused=REFUSED).running() as hub:
        served = resolved(hub, tmp_path, *expected)
        _, checked = check(hub, tmp_path / "other", *expected)
    errors = [line for line in checked.splitlines() if line.startswith("quire check: error: ")]
    for words, *lines in zip(expected.values(), served, errors, strict=True):
        assert all(words in line for line in lines), lines


def test_a_hub_without_ranges_is_refused(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 5000)
    with FakeHub({"org/plain": str(tmp_path)}, ranges=False).running() as hub:
        file = HubFile("org/plain", "model.safetensors", None)
        file.url = f"{hub.url}/org/plain/resolve/main/model.safetensors"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(ValueError, match="sends whole files only"):
            file.read(0, 100)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 (128x128 blocks)"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "gptq (4 bits, groups of 128, act-"),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, "awq (4 bits, whole rows)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "4 bits, nf4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (NVFP4)"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_awq"},
            "auto-round (4 bits, groups of 64, auto_round:auto_awq)",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
            },
            "quark (fp8_e4m3 per_tensor)",
        ),
    ],
)
def test_formats_in_words(settings, words):
    assert words in describe_format(settings, {})
