"""Predicts the time of a step on a GPU from its bytes, operations and launches, to be held against a measurement.

python benchmarks/step_model.py      prints the table of docs/gpu.md

A decode step reads the weights once (those of the experts that a batch is expected to hit) and every request's keys and
values, and multiplies; it takes the longer of both times, plus a launch gap for each kernel in the graph and each call
outside it. A prompt multiplies, and attends with half of the squares. The rates are the data sheets' times the fraction
that good kernels reach (`REACHED`), the gaps what an H100 takes between kernels of a graph and between calls of the
host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_models import MODELS

REACHED = 0.85  # share of the data sheet's bandwidth, in a decode step
MATMUL_REACHED = 0.65  # share of the data sheet's rate, in large products
GAP_IN_GRAPH, GAP_OUTSIDE = 1.0e-6, 5.0e-6  # seconds per kernel of a graph, and per call of the host
# launches of tests/worker/cuda/test_launches.py: outside the graph, and per layer inside it
OUTSIDE, DENSE_LAYER, EXPERTS_LAYER, AROUND_LAYERS = 7, 9, 12, 2
BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes and bf16 operations per second of the data sheet, the latter without sparsity."""

    name: str
    bandwidth: float
    rate: float


H100, H200 = Device("H100", 3.35e12, 989e12), Device("H200", 4.8e12, 989e12)


@dataclass(frozen=True, slots=True)
class Step:
    """The work of a step: bytes read, operations, kernels in the graph and calls outside it."""

    bytes: float
    flops: float
    kernels: int
    calls: int

    def seconds(self, device: Device, is_prompt: bool = False) -> float:
        rate = self.flops / (device.rate * MATMUL_REACHED)
        work = max(rate, self.bytes / (device.bandwidth * REACHED))
        # kernels of a prompt are launched one by one, but faster than they run
        gaps = 0.0 if is_prompt else self.kernels * GAP_IN_GRAPH
        return work + gaps + self.calls * GAP_OUTSIDE


class Shapes:
    """Sizes of a model of gpu_models.py, in weights."""

    def __init__(self, config: dict[str, Any]) -> None:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        self.layers, self.heads, self.head_dim = layers, config["num_attention_heads"], config["head_dim"]
        self.kv_heads, self.head = config["num_key_value_heads"], hidden * config["vocab_size"]
        self.attention = hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        self.experts, self.top_k = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
        self.expert = 3 * hidden * (config["moe_intermediate_size"] if self.experts else config["intermediate_size"])
        self.router = hidden * self.experts

    def experts_hit(self, tokens: int) -> float:
        """Return experts of a layer that a batch is expected to read, if each token's choice is uniform."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens) if self.experts else 1

    @property
    def kernels(self) -> int:
        return self.layers * (EXPERTS_LAYER if self.experts else DENSE_LAYER) + AROUND_LAYERS

    def products(self, tokens: int) -> float:
        """Return weights times tokens of all layers, each two operations."""
        return tokens * self.layers * (self.attention + self.router + self.expert * (self.top_k or 1))


def decode(shapes: Shapes, batch: int, context: int) -> Step:
    layer = shapes.attention + shapes.router + shapes.expert * shapes.experts_hit(batch)
    cache = batch * context * shapes.layers * 2 * shapes.kv_heads * shapes.head_dim
    attention = batch * context * shapes.layers * 2 * shapes.heads * shapes.head_dim
    products = shapes.products(batch) + batch * shapes.head
    size = BYTES * (shapes.layers * layer + shapes.head + cache)
    return Step(size, 2 * (products + attention), shapes.kernels, OUTSIDE)


def prompt(shapes: Shapes, tokens: int) -> Step:
    attention = tokens * tokens * shapes.layers * shapes.heads * shapes.head_dim  # half of the squares, twice
    layer = shapes.attention + shapes.router + shapes.expert * shapes.experts_hit(tokens)
    size = BYTES * (shapes.layers * layer + shapes.head)
    return Step(size, 2 * (shapes.products(tokens) + attention + shapes.head), shapes.kernels, OUTSIDE)


LOADS = [(1, 1024), (8, 1024), (64, 1024), (256, 1024)]
PROMPTS = [1024, 8192]


def rows() -> list[tuple[str, str, Step, bool]]:
    """Return (model, load, step, whether it is a prompt) of each load."""
    found = []
    for name in MEASURED:  # other models have weights of fewer bits or layers of other kinds
        shapes = Shapes(MODELS[name])
        for batch, context in LOADS:
            found.append((name, f"decode {batch} x {context}", decode(shapes, batch, context), False))
        found += [(name, f"prompt {tokens}", prompt(shapes, tokens), True) for tokens in PROMPTS]
    return found


# milliseconds on an H200 in the order of LOADS and PROMPTS (RESULTS.md); contexts of decode steps were 1,070 to 1,150
MEASURED = {
    "Llama-3.1-8B": [4.60, 4.86, 7.13, 16.81, 23.80, 212.69],
    "Qwen3-0.6B": [1.36, 1.49, 3.25, 9.97, 20.68, 34.00],
    "Qwen3-30B-A3B": [3.81, 8.83, 18.48, 25.68, 31.79],
}


def table() -> str:
    """Return predicted and measured milliseconds per model and load, as a table in Markdown."""
    loads = [*(f"decode {batch} x {context}" for batch, context in LOADS), *(f"prompt {tokens}" for tokens in PROMPTS)]
    lines = [f"| ms | {' | '.join(loads)} |", "|---" * (len(loads) + 1) + "|"]
    for model in dict.fromkeys(model for model, *_ in rows()):
        steps = [(step, is_prompt) for name, _, step, is_prompt in rows() if name == model]
        for device, label in ((H100, "H100"), (H200, "H200")):
            times = (f"{1e3 * step.seconds(device, is_prompt):.2f}" for step, is_prompt in steps)
            lines.append(f"| {model}, {label} | {' | '.join(times)} |")
        measured = [f"{seen:.2f}" for seen in MEASURED[model]] + ["-"] * (len(loads) - len(MEASURED[model]))
        lines.append(f"| measured, H200 | {' | '.join(measured)} |")
    return "\n".join(lines)


def costs() -> str:
    """Return the bytes, operations and launches of each step, as a table in Markdown."""
    lines = ["| model | step | GB read | TFLOP | launches |", "|---|---|---|---|---|"]
    for model, load, step, _ in rows():
        numbers = f"{step.bytes / 1e9:.2f} | {step.flops / 1e12:.3f} | {step.kernels + step.calls}"
        lines.append(f"| {model} | {load} | {numbers} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print(costs())
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
