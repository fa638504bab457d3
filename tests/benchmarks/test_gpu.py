"""The GPU benchmark: its arithmetic, its table, and a complete run on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_models, gpu_peers, gpu_report
from quire.server.text.tokenizer import Tokenizer
from quire.worker.models.registry import num_parameters, parse_model_spec, read_model_spec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COPY, MATMUL = 4.3e12, 0.78e15  # of an H200


@pytest.fixture(scope="module")
def llama():
    return parse_model_spec(gpu_models.LLAMA_3_1_8B)


def test_the_shapes_are_those_of_the_real_models(llama):
    assert (
        num_parameters(llama) == 8_030_261_248
        and num_parameters(parse_model_spec(gpu_models.QWEN3_0_6B)) == 596_049_920
    )


def test_limits_of_a_decode_step(llama):
    alone = gpu_report.decode_limit(llama, 1, 0, 2, COPY, MATMUL)
    # 16.06 GB of weights; the 1.05 GB of the embedding table are not read
    assert alone == pytest.approx(15.01e9 / COPY, rel=1e-3)
    assert gpu_report.decode_limit(llama, 1, 4096, 2, COPY, MATMUL) - alone == pytest.approx(0.537e9 / COPY, rel=1e-3)
    # the products take longer than reading the weights
    assert gpu_report.decode_limit(llama, 2000, 0, 2, COPY, MATMUL) == pytest.approx(
        2 * 7.505e9 * 2000 / MATMUL, rel=1e-3
    )
    tied = parse_model_spec(gpu_models.QWEN3_0_6B)
    # its table is the output head
    assert gpu_report.decode_limit(tied, 1, 0, 2, COPY, MATMUL) == pytest.approx(2 * 596_049_920 / COPY)


def test_limits_count_the_experts_that_are_hit():
    """Qwen3-30B-A3B: 30.5 billion weights, 3.35 of which a token passes (0.62 are the embedding table and the head)."""
    spec = parse_model_spec(gpu_models.QWEN3_30B_A3B)
    assert gpu_report.experts_hit(128, 8, 1) == pytest.approx(8) and gpu_report.experts_hit(128, 8, 64) > 125
    active = 3.35e9 - 151936 * 2048
    assert gpu_report.decode_limit(spec, 1, 0, 2, COPY, MATMUL) == pytest.approx(2 * active / COPY, rel=0.02)
    many = gpu_report.decode_limit(spec, 256, 0, 2, COPY, MATMUL)
    assert many == pytest.approx(2 * (30.53e9 - 151936 * 2048) / COPY, rel=0.01)
    assert gpu_report.prefill_limit(spec, 512, MATMUL) < 2 * 3.5e9 * 512 / MATMUL


def test_limit_of_a_prefill(llama):
    products = 2 * (8_030_261_248 - 2 * 128256 * 4096) * 8192 + 2 * 128256 * 4096
    attention = 4 * 32 * 32 * 128 * 8192 * 8193 / 2
    assert gpu_report.prefill_limit(llama, 8192, MATMUL) == pytest.approx((products + attention) / MATMUL)


@pytest.mark.parametrize(
    "events, busy, gaps",
    [
        ([], 0, 0),
        ([(5, 2)], 2, 0),
        ([(0, 4), (1, 1), (3, 3)], 6, 0),
        ([(10, 1), (0, 2), (4, 3)], 6, 5),
        ([(0, 2), (2, 2)], 4, 0),
    ],
)
def test_gaps_between_kernels(events, busy, gaps):
    assert gpu_report.busy_and_gaps(events) == (busy, gaps)


def test_results_are_merged(tmp_path):
    file = tmp_path / "gpu.json"
    gpu_report.update(file, models={"a": {"decode": [1]}}, device={"name": "x"})
    gpu_report.update(file, models={"a": {"prefill": [2]}, "b": {"skipped": "why"}})
    assert json.loads(file.read_text()) == {
        "models": {"a": {"decode": [1], "prefill": [2]}, "b": {"skipped": "why"}},
        "device": {"name": "x"},
    }


def test_the_table_shows_what_there_is():
    assert "no device was measured" in gpu_report.table({})
    row = {"batch": 8, "context": 1100, "ms": 4.0, "tokens_per_s": 2000.0, "limit_ms": 3.0, "fraction": 0.75}
    profile = {"gap": 0.021, "ms_per_step": {"a kernel": 1.5}}
    rest = {
        "sampled": [row | {"sampling": "min_p 0.05"}],
        "ramp": {"median_ms": 5.0, "worst_ms": 61.0},
        "recordings": {"number": 3, "seconds": 0.5, "longest": 0.25},
    }
    models = {
        "A": {"decode": [row], "profile": {"8": profile}, **rest},
        "B": {"skipped": "unknown architecture"},
        "C": {"http": {"requests": 2, "output_tokens": 100, "seconds": 4.0}},
    }
    text = gpu_report.table(
        {
            "models": models,
            "parts": {
                "tests": {"status": 0, "seconds": 3},
                "steps A": {"status": 124, "seconds": 75},
                "http A": {"status": 1, "seconds": 2},
            },
        }
    )
    for words in (
        "| decode, batch 8, context 1100 | 4.000 | 2000 | 3.000 | 0.75 |",
        "| decode, batch 8, context 1100, min_p 0.05 | 4.000 |",
        "the worst 61.0 ms",
        "3 graphs or times of steps recorded while idle in 0.5 s, the slowest in 250 ms",
        "gaps 2.1 %",
        "a kernel 1.500",
        "not measured: unknown architecture",
        "25 tokens/s",
        "| tests | 3 | well |",
        "| steps A | 75 | out of time |",
        "| http A | 2 | with status 1 |",
    ):
        assert words in text


def test_model_folders_are_complete(tmp_path):
    folder = gpu_models.write_model("tiny", tmp_path)
    tokenizer = Tokenizer.load(folder)
    assert read_model_spec(str(folder)).dtype == "bfloat16" and tokenizer.vocab_size == 600
    assert (
        tokenizer.decode(tokenizer.encode("Hello, wörld!")) == "Hello, wörld!" and tokenizer.decode([599, 400]).strip()
    )


def test_the_parts_of_a_set_fit_its_time():
    """The limits of the default models."""
    text = (ROOT / "benchmarks" / "gpu.sh").read_text()
    total = int(re.search(r"LIMIT:-(\d+)", text)[1])
    first, more = text.split('if [ "$set" = first ]')[1].split("\nelse\n")
    for lines in first, more.split("\nfi\n")[0]:
        others = [line for line in lines.splitlines() if "for model in $others" in line]
        once = "\n".join(line for line in lines.splitlines() if line not in others)
        part = r'(?:part (?:"[^"]+"|\w+)|measure \w+ "\$(?:largest|model)") (\d+)'
        seconds = sum(map(int, re.findall(part, once))) + 2 * sum(map(int, re.findall(part, " ".join(others))))
        assert 150 < seconds <= total - 10, seconds


def test_the_tests_that_the_script_names_exist():
    text = (ROOT / "benchmarks" / "gpu.sh").read_text()
    (file,) = re.findall(r"tests.?/worker/(tests/\S+\.py)", text)
    assert "takes_all_memory" in (ROOT / file).read_text()


def test_every_kind_is_compared_with_a_peer():
    text = (ROOT / "benchmarks" / "gpu.sh").read_text()
    pairs = [pair.split(":") for pair in re.search(r'pairs=\$\{PAIRS:-"([^"]+)"', text)[1].split()]
    assert all(model in gpu_models.MODELS and set(cases.split(",")) <= set(gpu_peers.CASES) for model, cases in pairs)
    assert {model for model, _ in pairs} == gpu_models.MODELS.keys() - {"tiny"}
    assert {case for _, cases in pairs for case in cases.split(",")} >= set(gpu_peers.CASES) - {"long"}


def test_a_comparison_goes_on_where_the_last_call_stopped(tmp_path):
    """The peer is quire itself."""
    environment = os.environ | {"PYTHON": sys.executable, "RESULTS": str(tmp_path / "gpu.json"), "PAIRS": "tiny:one"}
    environment |= {"VLLM": f"{sys.executable} -m quire", "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path)}
    (tmp_path / "out").mkdir()
    outputs = []
    for _ in range(2):
        command = ["bash", "benchmarks/gpu.sh", "--peers", "--smoke"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert "== vllm tiny:one" in outputs[0] and "==" not in outputs[1]
    assert re.search(r"\| tiny \| one \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", outputs[1])
    lines = (tmp_path / "out" / "gpu_peers.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["ready one", "one"] * 2


def test_what_a_part_left_behind_ends(monkeypatch):
    environment = os.environ | {gpu.PART: "test-of-leftovers"}
    left = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert gpu.end_leftovers("test-of-leftovers") == 1 and left.wait(10) == -signal.SIGKILL
        assert gpu.end_leftovers("test-of-leftovers") == gpu.end_leftovers("") == 0 and other.poll() is None
    finally:
        left.kill()
        other.kill()


def test_steps_are_measured_although_the_ceilings_were_not(tmp_path):
    measurement = gpu.Measurement.__new__(gpu.Measurement)
    measurement.results, measurement.device = tmp_path / "gpu.json", "cpu"
    gpu_report.update(measurement.results, parts={"ceilings": {"status": 124, "seconds": 40}})
    copy, matmul = measurement.rates()
    assert copy > 0 and matmul > 0 and measurement.rates() == (copy, matmul)


def test_everything_runs_on_a_cpu(tmp_path):
    environment = os.environ | {
        "PYTHON": sys.executable,
        "RESULTS": str(tmp_path / "gpu.json"),
        "OUT": str(tmp_path / "out"),
        "SKIP_TESTS": "1",
        "TMPDIR": str(tmp_path),
    }
    (tmp_path / "out").mkdir()
    for flags in ("--smoke",), ("--more", "--smoke"):
        command = ["bash", "benchmarks/gpu.sh", *flags]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    parts = ["ceilings", "steps tiny", "http tiny", "products", "offline tiny", "files tiny", "attention", "mixed tiny"]
    parts.append("drafts tiny")
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(parts, 0)
    assert [row["tokens"] for row in report["models"]["tiny"]["drafts"]][:3] == [1, 2, 3]
    tiny = report["models"]["tiny"]
    assert [row["batch"] for row in tiny["decode"]] == [1, 4] and all(
        row["fraction"] > 0 for row in tiny["decode"] + tiny["prefill"]
    )
    assert tiny["offline"]["output_tokens"] == tiny["http"]["output_tokens"] > 0 and tiny["http"]["median_ttft_ms"] > 0
    assert (
        tiny["startup"]["first token"] > tiny["startup"]["ready"] > 0 and tiny["startup_from_files"]["first token"] > 0
    )
    assert [row["sampling"] for row in tiny["sampled"]] == list(gpu.SAMPLED)
    # a CPU has no graphs, but steps are measured for drafts, which are on where --deterministic is (CPUs with AMX)
    drafts = {setting: value for setting, value, _ in tiny["choices"]}["speculation"]
    assert (tiny["recordings"]["number"] > 0) == (drafts == "auto")
    assert (
        0 < tiny["ramp"]["median_ms"] <= tiny["ramp"]["worst_ms"]
        and "| decode, batch 4, context 42, top_p 0.95, top_k 20 |" in done.stdout
    )
    assert tiny["profile"]["4"]["ms_per_step"] and (tmp_path / "out" / "gpu_profile.json.gz").stat().st_size > 1000
    assert "| decode, batch 4" in done.stdout and "offline: 6 requests" in done.stdout
