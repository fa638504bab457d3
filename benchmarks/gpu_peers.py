"""Compares quire with another server on one GPU: the same models, with random weights, the same requests over HTTP.

python benchmarks/gpu_peers.py run quire Llama-3.1-8B [CASE..]      starts the server, measures, and ends it
python benchmarks/gpu_peers.py run vllm Llama-3.1-8B [CASE..]       the same with vLLM (VLLM: its command)
python benchmarks/gpu_peers.py table                                ratios of what was measured
python benchmarks/gpu_peers.py smoke                                all cases on a CPU with a tiny model

`bash benchmarks/gpu.sh --peers` runs them in order of worth, each within its time.

Results are lines of JSON in --results (gpu_peers.jsonl). Cases: one, mixed, streams, long, drafts (repetitive text,
drafts by n-grams), schema (a JSON schema), adapters (ten LoRA adapters).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_models import MODELS, write_model
from quire.cli.bench.connection import Client
from quire.cli.bench.datasets import Sample
from quire.cli.bench.load import Target, run_load
from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.bench.report import summarize

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}
NUM_ADAPTERS, RANK = 10, 16
READY_SECONDS = {"quire": 90, "vllm": 200}
Body = dict[str, Any]


def requests_of(case: str, vocab: int, scale: float) -> list[Body]:
    """Return the bodies of a case; `scale` shortens them."""
    numbers = random.Random(case)

    def tokens(most: int) -> list[int]:
        return [numbers.randrange(300, vocab) for _ in range(max(4, int(most * scale)))]

    def body(prompt: list[int], outputs: int, **more: Any) -> Body:
        count = max(2, int(outputs * scale))
        fixed = {} if "response_format" in more else {"min_tokens": count, "ignore_eos": True}
        return {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0.0} | fixed | more

    many = max(4, int(256 * scale))
    match case:
        case "one":
            return [body(tokens(1024), 128)]
        case "long":
            return [body(tokens(8192), 1)]
        case "streams":
            return [body(tokens(1024), 256) for _ in range(max(2, many // 4))]
        case "mixed":
            return [body(tokens(numbers.randint(100, 1024)), numbers.randint(100, 1024)) for _ in range(many)]
        case "drafts":
            return [body(tokens(64) * 8, 256) for _ in range(max(2, many // 16))]
        case "schema":
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
            return [body(tokens(256), 128, response_format=form) for _ in range(max(2, many // 8))]
        case "adapters":
            return [body(tokens(512), 128) | {"model": f"a{i % NUM_ADAPTERS}"} for i in range(max(2, many // 4))]
    raise SystemExit(f"unknown case {case!r}")


CASES = ("one", "mixed", "streams", "long", "drafts", "schema", "adapters")


class Bodies(Target):
    """Sends requests whose bodies are the samples' prompts."""

    def body(self, sample: Sample) -> bytes:
        return json.dumps(sample.prompt | {"stream": True, "stream_options": {"include_usage": True}}).encode()


async def measure(client: Client, bodies: list[Body]) -> dict[str, float]:
    """Return figures of a case whose requests are sent at once."""
    samples = [Sample(body, len(body["prompt"]), body["max_tokens"]) for body in bodies]
    target = Bodies(client, "/v1/completions", "m", ignore_eos=False, temperature=0.0)
    results, seconds = await run_load(target, samples, [0.0] * len(samples), None, lambda result: None)
    if errors := [result.error for result in results if result.error]:
        raise RuntimeError(errors[0])
    figures = summarize(results, seconds, [], {})
    per_token = figures["median_tpot_ms"]
    return {
        "tokens_per_second": round(figures["output_throughput"], 1),
        "first_ms": round(figures["median_ttft_ms"], 1),
        "ms_per_token": round(per_token, 3) if math.isfinite(per_token) else 0.0,
    }


def write_adapters(folder: Path, config: dict[str, Any]) -> list[Path]:
    """Write ten random LoRA adapters of the attention's projections."""
    import torch
    from safetensors.torch import save_file

    hidden, size = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * size, "v_proj": config["num_key_value_heads"] * size}
    paths = []
    for i in range(NUM_ADAPTERS):
        path, generator = folder / f"a{i}", torch.Generator().manual_seed(i)
        path.mkdir(exist_ok=True)
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(outputs)}
        (path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, width in outputs.items():
                at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                for half, shape in (("lora_A", (RANK, hidden)), ("lora_B", (width, RANK))):
                    weight = torch.randn(shape, generator=generator) * 0.01
                    tensors[f"{at}.{half}.weight"] = weight.to(torch.bfloat16)
        save_file(tensors, path / "adapter_model.safetensors")
        paths.append(path)
    return paths


def command(server: str, folder: Path, cases: list[str], adapters: list[Path], smoke: bool) -> list[str]:
    """Return the command of a server, with its defaults but what the cases need."""
    common = ["serve", str(folder), "--load-format", "dummy", "--served-model-name", "m", "--port", "{port}"]
    common += ["--max-model-len", "512" if smoke else "9216"]
    if "drafts" in cases:
        common += ["--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 4})]
    if adapters:
        common += ["--lora-modules", *(f"{path.name}={path}" for path in adapters), "--max-loras", str(len(adapters))]
    if server == "vllm":
        lora = ["--enable-lora"] if adapters else []
        return [*shlex.split(os.environ.get("VLLM", "vllm")), *common, "--host", "127.0.0.1", *lora]
    device = ["--device", "cpu", "--num-gpu-blocks-override", "400"] if smoke else ["--record-graphs", "start"]
    return [sys.executable, "-m", "quire", *common, *device]


async def run(server: str, model: str, cases: list[str], note: Callable[[dict[str, Any]], None], smoke: bool) -> None:
    """Measure cases; those that need other settings of the server (drafts, adapters) in a server of their own."""
    config, scale = MODELS[model], 0.02 if smoke else 1.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(model, Path(temporary))
        groups = [[case for case in cases if case not in ("drafts", "adapters")]]
        groups += [[case] for case in ("drafts", "adapters") if case in cases]
        for group in filter(None, groups):
            adapters = write_adapters(Path(temporary), config) if "adapters" in group else []
            arguments = command(server, folder, group, adapters, smoke)
            with ServerProcess(arguments, free_port(), grace=20) as process:
                ready = await process.wait_for("/health", timeout=READY_SECONDS[server])
                note({"server": server, "model": model, "case": "ready " + group[0], "seconds": round(ready, 1)})
                for case in group:
                    bodies = requests_of(case, config["vocab_size"], scale)
                    # the first run compiles and fills caches, except prefixes: they differ
                    first = await measure(process.client, bodies)
                    found = first if smoke else await measure(process.client, [*map(_other_prompt, bodies)])
                    note({"server": server, "model": model, "case": case, "cold_first_ms": first["first_ms"]} | found)


def _other_prompt(body: Body) -> Body:
    return body | {"prompt": [token ^ 1 for token in body["prompt"]]}


def table(lines: list[dict[str, Any]]) -> str:
    """Return a row per model and case: throughput of both, and how much faster quire is."""
    found = {(line["server"], line["model"], line["case"]): line for line in lines}
    rows = ["| model | case | quire | vLLM | ratio |", "|---|---|---|---|---|"]
    for (server, model, case), ours in found.items():
        theirs = found.get(("vllm", model, case))
        if server != "quire" or theirs is None:
            continue
        if "seconds" in ours:
            a, b, ratio = ours["seconds"], theirs["seconds"], theirs["seconds"] / ours["seconds"]
        else:
            a, b = ours["tokens_per_second"], theirs["tokens_per_second"]
            ratio = a / b
        rows.append(f"| {model} | {case} | {a} | {b} | {ratio:.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu_peers.jsonl"))
    parser.add_argument("--smoke", action="store_true", help="run on a CPU, with short requests")
    parser.add_argument("action", choices=("run", "table", "smoke"))
    parser.add_argument("arguments", nargs="*", help="run: quire or vllm, a model, cases")
    given = parser.parse_args()

    def note(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    if given.action == "smoke":
        asyncio.run(run("quire", "tiny", list(CASES), note, smoke=True))
    elif given.action == "run":
        server, model, *cases = given.arguments
        asyncio.run(run(server, model, cases or list(CASES), note, given.smoke))
    else:
        print(table([json.loads(line) for line in given.results.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()
