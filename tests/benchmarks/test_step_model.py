"""The predictions of benchmarks/step_model.py against quire's own count of weights, its table in the documentation, and
benchmarks/host_cost.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_models, host_cost, step_model
from quire.worker.models.registry import num_parameters, parse_model_spec

NAMES = ["Llama-3.1-8B", "Qwen3-0.6B", "Qwen3-30B-A3B"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_model(name):
    config = gpu_models.MODELS[name]
    shapes = step_model.Shapes(config)
    layer = shapes.attention + shapes.router + shapes.expert * (shapes.experts or 1)
    heads = 1 if config.get("tie_word_embeddings") else 2
    want = num_parameters(parse_model_spec(config))
    assert shapes.layers * layer + heads * shapes.head == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_more_takes_longer(name):
    shapes = step_model.Shapes(gpu_models.MODELS[name])
    steps = [step_model.decode(shapes, batch, 1024) for batch in (1, 8, 64)]
    steps.append(step_model.decode(shapes, 64, 4096))
    for device in (step_model.H100, step_model.H200):
        seconds = [step.seconds(device) for step in steps]
        assert seconds == sorted(seconds)
    assert steps[0].seconds(step_model.H200) < steps[0].seconds(step_model.H100)


def test_one_token_reads_its_experts_and_many_read_all():
    shapes = step_model.Shapes(gpu_models.QWEN3_30B_A3B)
    assert shapes.experts_hit(1) == pytest.approx(8) and shapes.experts_hit(1000) == pytest.approx(128)


def test_the_documentation_has_the_table():
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert step_model.table() in text, "python benchmarks/step_model.py prints the table"


def test_the_cost_of_the_host_is_measured_by_part(capsys):
    assert host_cost.main(["--streams", "5", "--steps", "20", "--block-size", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].strip() for line in lines[1:]] == [*host_cost.PARTS, "all"]
    engine = host_cost.Engine(3, 10, 4)
    assert all(seconds > 0 for seconds in engine.step()) and len(engine.scheduler.running) == 3
