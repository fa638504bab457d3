"""The first command on a GPU: checks in five minutes that the CUDA path works and that all ways to run a step agree.

python benchmarks/gpu_first.py [--device cuda] [--results FILE] [STAGE ...]

Each stage is a process of its own with a time limit; a stage that fails does not stop the next. Results are merged into
one JSON file after each check. With `--device cpu` everything runs at small sizes, which shows that it runs.

probe      versions and packages, the rates of a copy and a product, each attention backend or its reason against
attention  every backend next to dense float32 attention, also in a cache of 2^32 entries
tokens     float32: eager and recorded steps, one and two in flight, give the CPU's tokens
families   which families' steps wait for the device, and which sizes cannot be recorded
layers     Llama 8B's layers: milliseconds of each next to its floor, and of the rest of a step
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks import gpu_report

LIMITS = {"probe": 45, "attention": 50, "tokens": 90, "families": 90, "layers": 75}  # seconds
BACKENDS = ("flash_attn_3", "flash_attn_2", "torch_varlen", "flash_mla", "flash_attn_3_mla", "triton_paged")
PACKAGES = [
    "torch", "triton", "transformers", "safetensors", "tokenizers", "msgspec", "zmq", "fastapi", "uvicorn",
    "llguidance", "prometheus_client", "jinja2", "yaml",
]  # fmt: skip
FAMILIES = [
    "qwen3", "llama3", "olmo2", "olmo3", "gemma3", "gemma2", "mistral", "cohere", "phi3", "qwen3-moe",
    "mixtral", "gpt-oss", "deepseek-v2", "deepseek-v3", "llama4", "glm4-moe", "granite4", "exaone4", "nemotron",
    "starcoder2",
]  # fmt: skip


class Checks:
    """The checks of one stage, printed and written to the results as they are made."""

    def __init__(self, stage: str, device: str, results: Path):
        self.stage, self.gpu, self.results = stage, device == "cuda", results
        self.device, self.started, self.failed = device, time.perf_counter(), []

    def note(self, name: str, good: bool, detail: object = "") -> None:
        seconds = time.perf_counter() - self.started
        print(f"[{seconds:5.1f} s] {'ok   ' if good else 'WRONG'} {name} {detail}", flush=True)
        gpu_report.update(self.results, first={self.stage: {name: {"ok": bool(good), "detail": str(detail)}}})
        if not good:
            self.failed.append(name)

    def attempt(self, name: str, function: Callable[[], Any]) -> Any:
        """Return the result of `function`; an exception is a failed check."""
        try:
            return function()
        except Exception as error:
            traceback.print_exc()
            self.note(name, False, f"{type(error).__name__}: {str(error)[:400]}")


# ---- stages


def probe(checks: Checks) -> None:
    import torch

    for name in PACKAGES:
        module = checks.attempt(f"import {name}", lambda name=name: importlib.import_module(name))
        if module is not None:
            checks.note(f"import {name}", True, getattr(module, "__version__", ""))
    checks.attempt("the server is imported", lambda: importlib.import_module("quire.server.app"))
    from tests.helpers.gpu import has_gpu

    checks.note("no TF32", torch.get_float32_matmul_precision() == "highest")
    checks.note("the tests find the GPU", has_gpu() == checks.gpu)
    from benchmarks.gpu import ceilings

    found = ceilings(checks.device)
    gpu_report.update(checks.results, device=found)
    checks.note("copy TB/s, product PFLOP/s", True, (found["copy_rate"] / 1e12, found["matmul_rate"] / 1e15))
    if not checks.gpu:
        return
    from quire.worker.attention.base import AttentionSpec
    from quire.worker.cuda.install import triton_ops

    checks.note("Triton compiles", triton_ops(torch.device("cuda", 0)) is not None)
    for name in BACKENDS:
        cls = _backend(name)
        size = cls.default_block_size
        reason = cls.supports(AttentionSpec(32, 8, 128, torch.bfloat16, torch.device("cuda", 0), size))
        checks.note(f"backend {name}", True, reason or "works")


def _backend(name: str) -> Any:
    from quire.worker.attention.registry import BACKENDS as registry

    module, _, cls = registry[name].partition(":")
    return getattr(importlib.import_module(module), cls)


def attention(checks: Checks) -> None:
    """A mixed and a decode batch; "far" caches are so large that offsets of entries exceed 32 bits."""
    import torch

    names = ("flash_attn_3", "flash_attn_2", "triton_paged", "cpu_paged") if checks.gpu else ("cpu_paged",)
    batches = {"mixed": ([1, 1, 17, 128, 300], [5, 700, 0, 64, 1000]), "decode": ([1] * 5, [0, 15, 255, 1023, 4000])}
    shapes = [(32, 8, 128), (14, 2, 64)]
    for name, shape, (batch, lengths), far in itertools.product(names, shapes, batches.items(), (False, True)):
        if far and (not checks.gpu or name == "cpu_paged" or shape[2] == 64):
            continue
        label = f"{name} {shape[0]}/{shape[1]}x{shape[2]} {batch}{' far' if far else ''}"
        checks.attempt(label, lambda args=(label, name, shape, *lengths, far): _attend(checks, *args))
        if checks.gpu:
            torch.cuda.empty_cache()


def _attend(checks: Checks, label: str, name: str, shape: tuple, queries: list, contexts: list, far: bool) -> None:
    import torch

    from quire.worker.attention.base import AttentionMetadata, AttentionSpec
    from tests.helpers.worker.dense_attention import DenseAttention

    device, cls, (heads, kv_heads, dim) = torch.device(checks.device), _backend(name), shape
    page = cls.default_block_size
    if reason := cls.supports(AttentionSpec(heads, kv_heads, dim, torch.bfloat16, device, page)):
        checks.note(label, True, f"skipped: {reason}")
        return
    backend, lens = cls(), [query + context for query, context in zip(queries, contexts)]
    width = -(-max(lens) // page)
    used = width * len(lens)
    total = max(used + 1, (1 << 32) // (page * kv_heads * dim)) if far else used + 1
    options = {"dtype": torch.bfloat16, "device": device}
    k, v = (torch.zeros(total, page, kv_heads, dim, **options) for _ in range(2))
    table = (torch.randperm(used) + total - used).view(len(lens), width).int().to(device)
    for cache in (k, v):
        cache[table.flatten().long()] = torch.randn(used, page, kv_heads, dim, **options)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    q = torch.randn(sum(queries), heads, dim, **options)
    slots = torch.zeros(len(q), dtype=torch.int64, device=device)
    meta = AttentionMetadata(backend, slots, starts, lengths, table, max(queries), max(lens))
    backend.build(meta)
    out = backend.forward(q, k, v, meta, dim**-0.5).float()
    with device:
        want = DenseAttention().forward(q.float(), k, v.float() if not far else v, meta, dim**-0.5)
    error = float((out - want).norm() / want.norm())
    checks.note(label, error < 1e-2, f"{error:.1e}")


PROMPTS = [[(11 * i + 3 * j) % 490 + 4 for j in range(1 + 9 * i)] for i in range(14)]
MODES = {
    "eager, one step in flight": {"enforce_eager": True, "steps_in_flight": 1},
    "eager, two steps in flight": {"enforce_eager": True, "steps_in_flight": 2},
    "graphs, one step in flight": {"steps_in_flight": 1, "record_graphs": "start"},
    "graphs, two steps in flight": {"steps_in_flight": 2, "record_graphs": "start"},
    "small steps": {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 60, "steps_in_flight": 2},
}


def tokens(checks: Checks) -> None:
    """A third of the rows sample at random: one of those may lie on the edge between two tokens."""
    from tests.helpers.models.checkpoints import build_checkpoint

    folder = build_checkpoint("qwen3", tempfile.mkdtemp())
    want, _ = _generate(folder, device="cpu", attention_backend="cpu_paged")
    for name, settings in MODES.items():
        if not checks.gpu and "graphs" in name:
            continue

        def run(name=name, settings=settings) -> None:
            got, graphs = _generate(folder, device=checks.device, **settings)
            wrong = [i for i, (one, other) in enumerate(zip(got, want)) if one != other]
            detail = f"rows that differ: {wrong or 'none'}; graphs: {graphs}"
            checks.note(name, len(wrong) <= 1 and all(i % 3 == 0 for i in wrong), detail)
            if "graphs" in name:
                checks.note(f"{name}: all sizes are recorded", graphs[0] == graphs[1] > 0)

        checks.attempt(name, run)


def _generate(folder: str, **settings: Any) -> tuple[list[list[int]], tuple[int, int]]:
    """(the tokens of each prompt, (recorded sizes, all sizes))."""
    from quire.engine.messages import SamplingParams
    from tests.helpers.in_process import InProcessEngine

    common = {"max_num_seqs": 16, "max_model_len": "400", "num_gpu_blocks_override": 700}
    engine = InProcessEngine(folder, **common | settings)
    try:
        params = [
            SamplingParams(max_tokens=12 + 2 * i, temperature=0.0 if i % 3 else 0.8, seed=i, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        results = engine.generate(PROMPTS, params)
        errors = [result.error for result in results if result.error]
        assert not errors, errors[0]
        forward = engine.executor._worker.runner.forward
        graphs = getattr(forward, "_graphs", {})
        return [result.token_ids for result in results], (sum(map(bool, graphs.values())), len(graphs))
    finally:
        engine.close()


def families(checks: Checks) -> None:
    from tests.helpers.models.checkpoints import config_of
    from tests.helpers.models.families import FAMILIES as MORE
    from tests.helpers.models.families import family_config

    for name in FAMILIES if checks.gpu else FAMILIES[:2]:
        folder = tempfile.mkdtemp()
        (family_config(name) if name in MORE else config_of(name)).save_pretrained(folder)
        checks.attempt(name, lambda name=name, folder=folder: _watch(checks, name, folder))


def _watch(checks: Checks, name: str, folder: str) -> None:
    """Run some steps of a family under torch's detector of waits."""
    import torch

    from quire.engine.messages import SamplingParams
    from tests.helpers.in_process import InProcessEngine

    settings = {"load_format": "dummy", "max_num_seqs": 4, "max_model_len": "120", "num_gpu_blocks_override": 120}
    dtype = "bfloat16" if checks.gpu else "float32"
    engine = InProcessEngine(folder, device=checks.device, dtype=dtype, record_graphs="start", **settings)
    runner = engine.executor._worker.runner
    execute, waits, num_steps = runner.execute, Counter(), 0

    def watched(step: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if not checks.gpu or num_steps <= 12:  # the first ones compile
            return execute(step)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return execute(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                found = (one for one in seen if "called a synchronizing" in str(one.message))
                waits.update(f"{one.filename}:{one.lineno}" for one in found)

    runner.execute = watched
    try:
        params = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, ignore_eos=True)
        for _ in range(3):
            results = engine.generate([[5, 6, 7], [8] * 20, [9, 10], [11] * 50], params)
            assert not any(result.error for result in results), [result.error for result in results]
    finally:
        engine.close()
    graphs = getattr(runner.forward, "_graphs", {})
    detail = f"{runner.backend.name}; {sum(map(bool, graphs.values()))} of {len(graphs)} graphs; waits: {dict(waits)}"
    checks.note(name, not waits and all(graphs.values()), detail)


def layers(checks: Checks) -> None:
    """Models of 2 and 6 layers: the difference is four layers, the remainder is the rest of a step."""
    times = {}
    for count, eager in ((2, False), (6, False), (6, True)):
        label = f"{count} layers, {'eager' if eager else 'recorded'}"
        found = checks.attempt(label, lambda count=count, eager=eager: _decode(checks, count, eager))
        if found:
            checks.note(label, True, {batch: f"{ms:.3f} ms" for batch, ms in found.items()})
            times |= {(count, eager, batch): ms for batch, ms in found.items()}
    rate = json.loads(checks.results.read_text(encoding="utf-8")).get("device", {}).get("copy_rate", 4.3e12)
    floor = 1e3 * 2 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) / rate
    for batch in sorted({batch for _, _, batch in times}):
        if all((count, eager, batch) in times for count, eager in ((2, False), (6, False), (6, True))):
            one = (times[6, False, batch] - times[2, False, batch]) / 4
            eager = one + (times[6, True, batch] - times[6, False, batch]) / 6
            beside = times[2, False, batch] - 2 * one
            detail = f"{one:.4f} ms, floor {floor:.4f}; eager {eager:.4f}; beside the layers {beside:.4f}"
            checks.note(f"a layer at batch {batch}", True, detail)


def _decode(checks: Checks, count: int, eager: bool) -> dict[int, float]:
    """Milliseconds of a decode step by batch size."""
    import torch

    from benchmarks.gpu import Engine
    from benchmarks.gpu_models import LLAMA_3_1_8B, TINY
    from quire.configs.config import Config

    folder = Path(tempfile.mkdtemp())
    shape = LLAMA_3_1_8B if checks.gpu else TINY
    common = {"num_hidden_layers": count, "torch_dtype": "bfloat16", "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(shape | common), encoding="utf-8")
    settings = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": "1024", "enable_prefix_caching": False}
    limits = {"max_num_seqs": 256, "num_gpu_blocks_override": 20000 if checks.gpu else 400}
    engine = Engine(
        Config.from_flat(
            model=str(folder),
            device=checks.device,
            enforce_eager=eager,
            record_graphs="start",
            **settings,
            **limits,
        )
    )
    times = {}
    with torch.inference_mode():
        for batch in (1, 64, 256) if checks.gpu else (1, 2):
            for i in range(batch):
                engine.add([300 + (31 * i + j) % 200 for j in range(128 if checks.gpu else 16)], 300, temperature=0.8)
            requests = engine.scheduler.requests
            while any(len(request.token_ids) <= request.num_prompt_tokens for request in requests.values()):
                engine.step()
            for _ in range(8):
                engine.step()
            steps, begin = 60 if checks.gpu else 4, time.perf_counter()
            for _ in range(steps):
                engine.step()
            times[batch] = 1e3 * (time.perf_counter() - begin) / steps
            engine.finish()
    engine.executor.shutdown()
    return times


# ---- one process per stage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, without a GPU")
    default = Path(__file__).parent / "gpu_first.json"
    parser.add_argument("--results", type=Path, default=default, metavar="FILE", help=f"default: {default.name}")
    parser.add_argument("--limit", type=float, default=290.0, help="seconds for all stages (default: 290)")
    parser.add_argument("--here", action="store_true", help="run the stage in this process")
    parser.add_argument("stages", nargs="*", choices=[[], *LIMITS], default=[], metavar="STAGE", help=", ".join(LIMITS))
    arguments = parser.parse_args()
    stages = arguments.stages or list(LIMITS)
    if arguments.here:
        checks = Checks(stages[0], arguments.device, arguments.results)
        checks.attempt(stages[0], lambda: globals()[stages[0]](checks))
        outcome = f"WRONG: {', '.join(checks.failed)}" if checks.failed else "all well"
        print(f"== {stages[0]}: {outcome}", flush=True)
        os._exit(bool(checks.failed))  # without the seconds in which torch's libraries are torn down
    deadline = time.monotonic() + arguments.limit
    return max([run_stage(stage, arguments, deadline) for stage in stages])


def run_stage(stage: str, arguments: argparse.Namespace, deadline: float) -> int:
    """1 if a check of the stage failed or its time was up."""
    root = Path(__file__).parent.parent
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, __file__, "--here", stage, "--device", arguments.device]
    command += ["--results", str(arguments.results)]
    limit = min(LIMITS[stage], deadline - time.monotonic())
    try:
        ended = subprocess.run(
            command, env=environment | {"PYTHONPATH": os.pathsep.join(paths)}, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        print(f"== {stage}: out of time after {limit:.0f} s", flush=True)
        return 1
    return int(ended.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
