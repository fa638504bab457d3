"""The shortest possible time of a step, from the two measured limits of the card, and the table of all results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported where it is needed: a part's end is noted without it
    from quire.worker.spec.model import ModelSpec

GOALS = (
    "goals on one H200, 8B in bf16: batch-1 decode at 0.85 of its limit, batch-256 decode at 0.7, prefill at 0.6 "
    "of the matmul rate, gaps between steps under 3 % of the step, "
    "first token 15 s after the command with the weights in the page cache"
)

PLAN = {"weights": "weights", "activations": "activations", "graphs": "CUDA graphs", "kv_cache": "KV cache"}

_ENDINGS = {0: "well", 124: "out of time", 137: "out of time"}  # by exit status of a part


def update(file: Path, **changes: Any) -> None:
    """Merge `changes` into the JSON object in `file`, dictionaries recursively, and replace the file atomically."""
    report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    _merge(report, changes)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(new, file)


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def decode_limit(
    spec: ModelSpec, batch: int, context: int, dtype_bytes: int, copy_rate: float, matmul_rate: float
) -> float:
    """Return the least seconds of a token for each of `batch` requests: the time to read weights, keys and values once,
    or to multiply, whichever is longer.

    The embedding table is not read (a few rows are) unless it is the output head, too. Only experts that some token
    chose are read, and each token passes its own.
    """
    from quire.worker.spec.model import kv_bytes_per_token

    weights = _matrix_parameters(spec) - _idle_experts(spec, batch)
    read = weights * dtype_bytes + batch * context * kv_bytes_per_token(spec, dtype_bytes)
    products = _matrix_parameters(spec) - _idle_experts(spec, 1)
    return max(read / copy_rate, 2 * products * batch / matmul_rate)


def prefill_limit(spec: ModelSpec, length: int, matmul_rate: float) -> float:
    """Return seconds that a prompt of `length` takes at best: its products, with the output head for the last token
    only, and the triangle of attention.
    """
    head = spec.vocab_size * spec.hidden_size
    products = 2 * (_matrix_parameters(spec) - _idle_experts(spec, 1) - head) * length + 2 * head
    entries = sum(layer.num_heads * (layer.head_dim + layer.v_head_dim) for layer in spec.layers)
    attention = 2 * entries * length * (length + 1) / 2
    return (products + attention) / matmul_rate


def experts_hit(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Return the expected number of experts that `num_tokens` tokens pass, each `top_k` of them, if all are as
    likely.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def _idle_experts(spec: ModelSpec, num_tokens: int) -> float:
    """Return weights of the experts that none of `num_tokens` tokens passes."""
    layers = [layer.moe for layer in spec.layers if layer.moe]
    idle = (
        moe.intermediate_size
        * (moe.routing.num_experts - experts_hit(moe.routing.num_experts, moe.routing.top_k, num_tokens))
        for moe in layers
    )
    return 3 * spec.hidden_size * sum(idle)


def _matrix_parameters(spec: ModelSpec) -> int:
    from quire.worker.models.registry import num_parameters

    return num_parameters(spec) - (0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size)


def busy_and_gaps(events: list[tuple[float, float]]) -> tuple[float, float]:
    """Return (time in which some event runs, time between the first and the last in which none does), of events (start,
    duration).
    """
    busy, end, first = 0.0, None, None
    for start, duration in sorted(events):
        first = start if first is None else first
        busy += max(start + duration - max(start, start if end is None else end), 0.0)
        end = start + duration if end is None else max(end, start + duration)
    return (0.0, 0.0) if end is None else (busy, end - first - busy)


def table(report: dict[str, Any]) -> str:
    """Return the results that `report` has, as Markdown."""
    device = report.get("device", {})
    lines = [
        f"{device.get('name', 'no device was measured')}; torch {device.get('torch')}, triton {device.get('triton')}"
    ]
    if "copy_rate" in device:
        lines.append(
            f"measured here: copy {device['copy_rate'] / 1e12:.2f} TB/s (read and written), bf16 matmul "
            f"{device['matmul_rate'] / 1e12:.1f} TFLOP/s"
        )
    for name, model in report.get("models", {}).items():
        lines += ["", f"## {name}", *_model_lines(model)]
    if "products" in report:
        from benchmarks.gpu_products import rows_of_table

        lines += ["", *rows_of_table(report["products"])]
    if report.get("attention"):
        from benchmarks import gpu_attention

        lines += ["", *gpu_attention.rows_of_table(report["attention"])]
    lines += ["", "| part | seconds | ended |", "|---|---|---|"]
    lines += [
        f"| {name} | {part['seconds']} | {_ENDINGS.get(part['status'], 'with status ' + str(part['status']))} |"
        for name, part in report.get("parts", {}).items()
    ]
    return "\n".join([*lines, "", GOALS])


def _model_lines(model: dict[str, Any]) -> list[str]:
    if "skipped" in model:
        return [f"not measured: {model['skipped']}"]
    lines = []
    if "choices" in model:
        lines.append("; ".join(f"{name} {value}" for name, value, _ in model["choices"]))
    if "plan" in model:
        sizes = [f"{title} {model['plan'].get(name, 0) / 2**30:.2f}" for name, title in PLAN.items()]
        lines.append(
            f"memory in GiB: {', '.join(sizes)}"
            + (f"; torch's peak {model['peak_memory'] / 2**30:.2f}" if "peak_memory" in model else "")
        )
    if model.get("decode") or model.get("prefill"):
        lines += ["", "| step | ms | tokens/s | limit ms | fraction of the limit |", "|---|---|---|---|---|"]
        for row in [*model.get("decode", []), *model.get("prefill", []), *model.get("sampled", [])]:
            decode = f"decode, batch {row.get('batch')}, context {row.get('context')}"
            step = f"prefill of {row['length']}" if "length" in row else decode
            step += f", {row['sampling']}" if "sampling" in row else ""
            figures = f"{row['ms']:.3f} | {row['tokens_per_s']:.0f} | {row['limit_ms']:.3f} | {row['fraction']:.2f}"
            lines.append(f"| {step} | {figures} |")
        lines.append("")
    if model.get("mixed"):
        runs = (f"{row['way']} {row['length']}: {row['ms']:.1f} ms" for row in model["mixed"])
        lines.append(f"a prompt alone by its tokens: {', '.join(runs)}")
    if model.get("drafts"):
        runs = (f"{row['tokens']}: {row['decode_ms']:.2f} and {row['verify_ms']:.2f}" for row in model["drafts"])
        lines.append(f"ms by tokens, of one request each and of one that verifies drafts: {', '.join(runs)}")
    if "ramp" in model:
        lines.append(
            f"requests arriving before anything is recorded: a step takes {model['ramp']['median_ms']:.1f} ms, "
            f"the worst {model['ramp']['worst_ms']:.1f} ms"
        )
    if "recordings" in model:
        recordings = model["recordings"]
        lines.append(
            f"{recordings['number']} graphs or times of steps recorded while idle in {recordings['seconds']:.1f} s, "
            f"the slowest in {1e3 * recordings['longest']:.0f} ms"
        )
    for batch, profile in model.get("profile", {}).items():
        gap = "no device events" if profile["gap"] is None else f"gaps {100 * profile['gap']:.1f} % of the time"
        top = ", ".join(f"{name[:48]} {ms:.3f}" for name, ms in list(profile["ms_per_step"].items())[:6])
        lines.append(f"ten steps of batch {batch}: {gap}; ms per step: {top}")
    for where in ("offline", "http"):
        if where in model:
            run = model[where]
            line = f"{where}: {run['requests']} requests, {run['output_tokens']} tokens in {run['seconds']:.2f} s: "
            line += f"{run['output_tokens'] / run['seconds']:.0f} tokens/s"
            if "median_ttft_ms" in run:
                line += f", TTFT median {run['median_ttft_ms']:.0f} ms, TPOT median {run['median_tpot_ms']:.2f} ms"
            lines.append(line)
    for kind in ("startup", "startup_from_files"):
        if kind in model:
            stages = (f"{stage} after {seconds:.2f} s" for stage, seconds in model[kind].items())
            lines.append(f"{kind.replace('_', ' ')}: {', '.join(stages)}")
    return lines
