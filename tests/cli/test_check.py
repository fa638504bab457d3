"""Tests that `quire check` prints the plan of `quire serve`, and refuses the same settings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from quire.cli import main as cli
from quire.server.startup.plan_table import plan_table
from tests.helpers.in_process import InProcessEngine
from tests.helpers.server.light_model import write_light_model

KV_BYTES = 16 * 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_light_model(tmp_path_factory.mktemp("light"))


def check(*arguments: str) -> int:
    return cli.main(["check", *arguments, "--device", "cpu", "--log-level", "error"])


def test_it_plans_what_the_worker_then_does(folder, capsys):
    assert check(folder, "--load-format", "dummy", "--kv-cache-memory-bytes", str(KV_BYTES), "--max-num-seqs", "5") == 0
    planned = capsys.readouterr().out
    engine = InProcessEngine(folder, load_format="dummy", kv_cache_memory_bytes=KV_BYTES, max_num_seqs=5)
    lines = plan_table(engine.ready).splitlines()
    engine.close()
    measured = ("memory of", "  weights", "  activations", "  reserve")  # estimated, or free at the moment
    for line in lines:
        assert line.startswith(measured) or line in planned.splitlines()
    assert "chat template: yes" in planned and "default sampling parameters: OpenAI's" in planned


def test_it_counts_states_and_checkpoints(tmp_path, capsys):
    """Two states for each request, and with more memory the rest for checkpoints; too little memory is refused."""
    folder = write_light_model(
        tmp_path,
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
    )
    found = {}
    for memory in ("64M", "240K", "120K"):
        code = check(folder, "--load-format", "dummy", "--max-num-seqs", "8", "--kv-cache-memory-bytes", memory)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        choices = re.findall(r"^  (recurrent states|spare states) += (\d+)", printed.out, re.MULTILINE)
        found[memory] = {name: int(value) for name, value in choices}
        assert "each, two per request and the rest for cached prefixes)" in printed.out
    assert found["64M"] == {"recurrent states": 8 * 10 + 32, "spare states": 32}
    assert found["240K"] == {"recurrent states": 24, "spare states": 4}
    assert found["120K"] == {"recurrent states": 16}
    assert check(folder, "--load-format", "dummy", "--max-num-seqs", "64", "--kv-cache-memory-bytes", "120K") == 1
    assert "--max-num-seqs 64: the recurrent states of 64 requests need 128 KiB" in capsys.readouterr().err


def test_it_plans_for_the_engines_of_this_machine(folder, capsys):
    def planned(*flags: str) -> list[str]:
        assert check(folder, "--load-format", "dummy", *flags) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("  num_threads")]

    several = ["--data-parallel-size", "64"]
    assert planned(*several, "--data-parallel-size-local", "1") == planned()
    assert planned(*several, "--data-parallel-rank", "63") == planned()
    assert check(folder, "--load-format", "dummy", *several, "--data-parallel-size-local", "0") == 0
    assert "no engine runs on this machine" in capsys.readouterr().out
    assert check(folder, "--load-format", "dummy", *several, "--data-parallel-rank", "64") == 1
    assert "engine 64 of this machine must be less than" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no model.safetensors or model.safetensors.index.json"),
        (
            ["--load-format", "dummy", "--max-model-len", "4096"],
            "--max-model-len 4096 is more than this model's 2048 tokens: set it to at most 2048, or auto",
        ),
        (
            ["--load-format", "dummy", "--max-model-len", "2048", "--kv-cache-memory-bytes", "1M"],
            (
                "set --max-model-len to at most 656 (or auto), or enlarge the KV cache with "
                "--kv-cache-memory-bytes 3170304"
            ),
        ),
        (["--load-format", "dummy", "--tensor-parallel-size", "3"], "tensor_parallel_size 3"),
        (
            ["--load-format", "dummy", "--chat-template", "/nowhere.jinja"],
            "chat_template: there is no file /nowhere.jinja",
        ),
        (["--load-format", "dummy", "--generation-config", "/nowhere"], "generation_config: cannot read /nowhere"),
        (
            ["--load-format", "dummy", "--attention-backend", "flash"],
            "--attention-backend is 'flash', but must be one of",
        ),
    ],
)
def test_it_refuses_with_the_number_to_change(folder, arguments, message, capsys):
    assert check(folder, *arguments) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and printed.err.startswith("quire check: error: ")


@pytest.mark.parametrize(
    "advice",
    [
        ["--max-model-len", "656", "--kv-cache-memory-bytes", "1M"],
        ["--max-model-len", "2048", "--kv-cache-memory-bytes", "3170304"],
    ],
)
def test_its_advice_works(folder, advice, capsys):
    assert check(folder, "--load-format", "dummy", *advice) == 0
    assert f"the full length of {int(advice[1]):,}" in capsys.readouterr().out


def test_it_reads_the_headers_of_the_weights(checkpoint, folder, tmp_path, capsys):
    assert check(checkpoint("qwen3"), "--kv-cache-memory-bytes", str(KV_BYTES)) == 0
    shutil.copytree(checkpoint("qwen3"), tmp_path / "wrong")
    config = json.loads(Path(tmp_path / "wrong" / "config.json").read_text())
    Path(tmp_path / "wrong" / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    assert check(str(tmp_path / "wrong")) == 1
    assert "mlp.gate_proj.weight is [160, 64], expected [96, 64]" in capsys.readouterr().err


def test_an_unknown_architecture_is_named(tmp_path, capsys):
    assert check(write_light_model(tmp_path, architectures=["NoSuchForCausalLM"], model_type="no_such")) == 1
    assert "NoSuchForCausalLM" in (shown := capsys.readouterr().err) and "docs/models.md" in shown


def test_it_warns_of_a_removed_setting(folder, caplog, capsys):
    arguments = folder, "--load-format", "dummy", "--kv-cache-memory-bytes", str(KV_BYTES)
    assert check(*arguments, "--cache-reuse", "16") == 0
    (warning,) = [one.getMessage() for one in caplog.records if "--cache-reuse" in one.getMessage()]
    assert warning.startswith("--cache-reuse 16: no effect")
