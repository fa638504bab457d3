"""Measurements on a GPU, in parts that benchmarks/gpu.sh calls one after another; each adds its results to one JSON
file.

python benchmarks/gpu.py [--device cuda] [--results FILE] PART [MODEL]      see PARTS
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import importlib.metadata
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks import gpu_report
from benchmarks.gpu_models import MODELS, write_model
from quire.configs.config import Config

BATCHES, CONTEXT, PREFILLS = (1, 8, 64, 256), 1024, (1024, 8192, 32768)
MIXED = (16, 128, 512, 1024)  # prompts of steps that are replayed in pieces
# that of nano-vllm and mini-sglang: input and output lengths uniform, seed 0
WORKLOAD = {"requests": 256, "lengths": (100, 1024)}
PROFILED = (1, 64, 256)  # batches of which ten steps are profiled
SAMPLED = {  # sampling parameters for the largest batch; the other measurements sample randomly without filters
    "greedy": {"temperature": 0.0},
    "top_p 0.95, top_k 20": {"top_p": 0.95, "top_k": 20},
    "top_p 0.95": {"top_p": 0.95},
    "temperature 2, top_p 0.99": {"temperature": 2.0, "top_p": 0.99},
    "min_p 0.05": {"min_p": 0.05},
    "min_tokens, bias, bad words": {
        "min_tokens": 500,
        "stop_token_ids": [301, 302],
        "logit_bias": {303: 1.0},
        "bad_words_ids": [[304, 305], [306]],
    },
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "logprobs 20": {"logprobs": 20},
}
RAMP = 64  # requests that arrive one after another at an engine that has just started


PARTS = (
    "ceilings", "steps", "mixed", "offline", "http", "files", "products", "attention", "drafts", "note", "table",
)  # fmt: skip
PART = "GPU_BENCHMARK_PART"  # a variable that all processes of a part inherit


def end_leftovers(part: str) -> int:
    """Kill the processes that `part` left behind, by their inherited variable: the next part needs the memory of the
    card that they hold. Returns their number.
    """
    marker, ended = f"{PART}={part}".encode(), 0
    for folder in Path("/proc").glob("[0-9]*") if part else ():
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            if marker in variables and int(folder.name) not in (os.getpid(), os.getppid()):
                os.kill(int(folder.name), signal.SIGKILL)
                ended += 1
        except OSError:  # it has ended, or is another user's
            continue
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: everything in small sizes")
    results, folder = Path(__file__).with_name("gpu.json"), Path(tempfile.gettempdir(), "quire-gpu-models")
    parser.add_argument(
        "--results", type=Path, default=results, metavar="FILE", help="JSON file (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=folder, metavar="DIR", help="parent of the models' folders")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("rest", nargs="*", help="a model's name; for note: name, exit status and seconds of a part")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # out of time: a normal exit also ends child processes
    if arguments.part == "note":
        name, status, seconds = arguments.rest
        ended = end_leftovers(os.environ.get(PART, ""))
        found = {"status": int(status), "seconds": int(seconds)} | ({"ended": ended} if ended else {})
        gpu_report.update(arguments.results, parts={name: found})
    elif arguments.part == "table":
        print(gpu_report.table(json.loads(arguments.results.read_text(encoding="utf-8"))))
    elif arguments.part == "ceilings":
        gpu_report.update(arguments.results, device=ceilings(arguments.device))
    elif arguments.part in ("attention", "products"):
        from benchmarks.gpu_attention import decoding
        from benchmarks.gpu_products import products

        found = decoding(_seconds) if arguments.part == "attention" else products(arguments.device, _seconds)
        gpu_report.update(arguments.results, **{arguments.part: found})
    else:
        (name,) = arguments.rest
        Measurement(name, arguments).run(arguments.part)
    return 0


# ---- the device


def ceilings(device: str) -> dict[str, Any]:
    """Return names and versions, bytes per second of a copy (read and written) and FLOP/s of a bf16 product of random
    matrices.
    """
    import torch

    size, n = (1 << 30, 8192) if device == "cuda" else (1 << 22, 256)
    source = torch.randn(size // 2, device=device).to(torch.bfloat16)
    target, a, b = torch.empty_like(source), *(torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    copy, matmul = _seconds(lambda: target.copy_(source), device), _seconds(lambda: torch.mm(a, b), device)
    found = {
        "name": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "copy_rate": 2 * source.nbytes / copy,
        "matmul_rate": 2 * n**3 / matmul,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    if device == "cuda":
        found["memory"] = torch.cuda.get_device_properties(0).total_memory
    return found


def _seconds(function, device: str) -> float:
    """Return median of 20 runs after 5; on a CPU, where nothing is measured, of 2 after 1."""
    import torch

    times, first, runs = [], *((5, 20) if device == "cuda" else (1, 2))
    for _ in range(first + runs):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            function()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[first:])


def check_number(num_tokens: int, expected: int) -> None:
    if num_tokens != expected:
        raise RuntimeError(f"{num_tokens} tokens came instead of {expected}")


# ---- an engine without its process


class Engine:
    """Runs scheduler and worker in this process as `EngineCore.step` does."""

    def __init__(self, config: Config):
        from quire.engine.executor.base import get_executor, steps_in_flight
        from quire.engine.kv.manager import KVCacheManager
        from quire.engine.scheduler import Scheduler

        self.executor = get_executor(config)
        self.ready = self.executor.initialize(lambda phase, fraction: None)
        self.depth = steps_in_flight(config, self.ready)
        self.scheduler = Scheduler(
            config.scheduler, self.ready, KVCacheManager(self.ready.num_blocks, self.ready.block_size, False)
        )
        self.in_flight: deque = deque()
        self.num_added = 0

    def add(self, prompt: list[int], max_tokens: int, **sampling: Any) -> None:
        from quire.engine.messages import AddRequest, SamplingParams

        self.num_added += 1
        params = SamplingParams(max_tokens=max_tokens, seed=self.num_added, ignore_eos=True, **sampling)
        self.scheduler.add(AddRequest(str(self.num_added), prompt, params))

    def work_idle(self) -> list[float]:
        """Make the worker do its idle work (it records graphs). Returns the seconds of each piece."""
        seconds, more = [], self.ready.works_idle
        while more:
            begin = time.perf_counter()
            more = self.executor.workers.work_idle()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def step(self) -> None:
        """Launch steps up to the depth, then process the results of the oldest."""
        while len(self.in_flight) < self.depth and (step := self.scheduler.schedule()):
            self.in_flight.append((step, self.executor.execute(step.input)))
        step, pending = self.in_flight.popleft()
        for outputs in self.scheduler.update(step, pending.result()).values():
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)

    def prefill(self) -> None:
        """Run steps until each request has its first token."""
        requests = self.scheduler.requests
        while any(len(request.token_ids) <= request.num_prompt_tokens for request in requests.values()):
            self.step()

    def finish(self) -> None:
        """Abort all requests and finish the steps in flight."""
        self.scheduler.abort([request_id for _, request_id in self.scheduler.requests])
        while self.in_flight:
            self.step()


# ---- a model


def _row(sizes: dict[str, Any], num_tokens: int, seconds: float, limit: float) -> dict[str, Any]:
    """Return figures of a step of `num_tokens`, which takes at least `limit` seconds, and print them."""
    times = {"ms": 1e3 * seconds, "limit_ms": 1e3 * limit, "fraction": limit / seconds}
    row = sizes | times | {"tokens_per_s": num_tokens / seconds}
    print(row, flush=True)
    return row


class Measurement:
    """Measures the parts of one model."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        if name not in MODELS:
            raise ValueError(f"{name!r} is not one of {', '.join(MODELS)}")
        self.name, self.device, self.results = name, arguments.device, arguments.results
        self.gpu = self.device == "cuda"
        self.folder = write_model(name, arguments.folder)
        self.vocab_size = MODELS[name]["vocab_size"]
        self.max_model_len = min(MODELS[name]["max_position_embeddings"], 40960)
        self.batches, self.context, self.prefills = (BATCHES, CONTEXT, PREFILLS) if self.gpu else ((1, 4), 32, (64,))
        self.num_requests, self.lengths = (WORKLOAD["requests"], WORKLOAD["lengths"]) if self.gpu else (6, (8, 24))

    def run(self, part: str) -> None:
        from quire.worker.models.registry import read_model_spec

        try:
            self.spec = read_model_spec(str(self.folder))
        except ValueError as error:
            print(f"{self.name} is not measured: {error}")
            self.note(skipped=str(error))
            return
        parts = {"steps": self.steps, "mixed": self.mixed, "offline": self.offline, "http": self.http}
        (parts | {"files": self.files, "drafts": self.drafts})[part]()

    def note(self, **found: Any) -> None:
        gpu_report.update(self.results, models={self.name: found})

    def rates(self) -> tuple[float, float]:
        """Return bytes and FLOPs per second, measured here if the part that measures them did not end."""
        report = json.loads(self.results.read_text(encoding="utf-8"))
        if "device" not in report:
            report["device"] = ceilings(self.device)
            gpu_report.update(self.results, device=report["device"])
        return report["device"]["copy_rate"], report["device"]["matmul_rate"]

    def settings(self) -> dict[str, Any]:
        settings = {"record_graphs": "start", "load_format": "dummy", "device": self.device, "dtype": "bfloat16"}
        return settings | {"max_model_len": str(self.max_model_len)}

    def engine(self, **more: Any) -> Engine:
        settings = self.settings() | {"enable_prefix_caching": False} | more
        return Engine(Config.from_flat(model=str(self.folder), **settings))

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(300, self.vocab_size) for _ in range(length)]

    # ---- steps

    def steps(self) -> None:
        import msgspec
        import torch

        start = time.perf_counter()
        engine = self.engine()
        print(f"{self.name}: loaded after {time.perf_counter() - start:.1f} s")
        self.note(plan=msgspec.to_builtins(engine.ready.plan), choices=engine.ready.choices)
        self.copy_rate, self.matmul_rate = self.rates()
        found: dict[str, Any] = {"decode": [], "sampled": [], "prefill": [], "profile": {}}
        with torch.inference_mode():
            self.note(ramp=self.ramp(engine))
            recordings = engine.work_idle()
            longest = max(recordings, default=0.0)
            self.note(recordings={"number": len(recordings), "seconds": sum(recordings), "longest": longest})
            num_slots = engine.ready.num_blocks * engine.ready.block_size
            for batch in self.batches:
                if batch > engine.ready.max_num_seqs or batch * (self.context + 512) > num_slots:
                    print(f"batch {batch} does not fit")
                    continue
                found["decode"].append(self.decode(engine, batch, self.context, found["profile"]))
                self.note(**found)
            if found["decode"]:
                batch = found["decode"][-1]["batch"]
                for name, sampling in SAMPLED.items():
                    row = {"sampling": name, **self.decode(engine, batch, 16, **sampling)}
                    found["sampled"].append(row)
                    self.note(sampled=found["sampled"])
            for length in self.prefills:
                if length < engine.ready.max_model_len:
                    found["prefill"].append(self.prefill(engine, length))
                    self.note(**found)
        if self.gpu:
            self.note(peak_memory=torch.cuda.max_memory_reserved())
        engine.executor.shutdown()

    def mixed(self) -> None:
        """Measure steps of a prompt, alone: eager, then with the parts between the attentions recorded. Twice in
        turn.
        """
        import torch

        engine = self.engine()
        forward, found = engine.executor._worker.runner.forward, []
        self.note(mixed=found)
        recorded = getattr(forward, "mixed", None)
        if recorded is None:
            print(f"{self.name}: no step is recorded in pieces")
            return
        self.copy_rate, self.matmul_rate = self.rates()
        with torch.inference_mode():
            engine.work_idle()
            for way, mixed in (("eager", None), ("pieces", recorded)) * 2:
                forward.mixed = mixed
                found += [{"way": way, **self.prefill(engine, length)} for length in MIXED]
        self.note(mixed=found)
        engine.executor.shutdown()

    def drafts(self) -> None:
        """Measure for m tokens a step of one token each of m requests, which replays one graph, and one of a request
        that verifies m - 1 drafts, which runs in pieces. Drafts of which a share p is right give (1 + m p) tokens in
        the second time instead of one token in the first.
        """
        engine = self.engine(max_model_len="1024", max_num_seqs=64, speculative_config='{"method": "auto"}')
        engine.work_idle()
        measured = engine.executor._worker.runner.measurement
        found = [
            {"tokens": size, "decode_ms": 1e3 * seconds, "verify_ms": 1e3 * measured.of_one[size]}
            for size, seconds in measured.seconds.items()
        ]
        print(*found, sep="\n", flush=True)
        self.note(drafts=found)
        engine.executor.shutdown()

    def ramp(self, engine: Engine) -> dict[str, Any]:
        """Let requests arrive every other step at an engine without graphs. Returns milliseconds per token of the
        running ones, including prompts and recordings.
        """
        rng, times = random.Random(0), []
        for i in range(2 * (RAMP if self.gpu else 4)):
            if i % 2 == 0:
                engine.add(self.prompt(rng, 16), max_tokens=500)
            begin = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - begin))
        engine.finish()
        times = times[8:] or times  # the first ones compile
        return {"median_ms": statistics.median(times), "worst_ms": max(times)}

    def decode(
        self, engine: Engine, batch: int, context: int, profiles: dict[str, Any] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """Measure a step in which all of `batch` requests get a token: the median of three runs of steps."""
        rng = random.Random(batch)
        for _ in range(batch):
            engine.add(self.prompt(rng, context), 500, **sampling)
        engine.prefill()
        for _ in range(6):  # compile
            engine.step()
        begin = time.perf_counter()
        for _ in range(4):
            engine.step()
        count = max(8, min(60, int(4 * 0.5 / max(time.perf_counter() - begin, 1e-6)))) if self.gpu else 8
        windows = []
        for _ in range(3):
            begin = time.perf_counter()
            for _ in range(count):
                engine.step()
            windows.append((time.perf_counter() - begin) / count)
        if profiles is not None and (batch in PROFILED or not self.gpu):
            profiles[str(batch)] = self.profile(engine, batch)
        engine.finish()
        context += 10 + 2 * count  # on average
        limit = gpu_report.decode_limit(self.spec, batch, context, 2, self.copy_rate, self.matmul_rate)
        seconds = statistics.median(windows)
        runs = {"ms_of_runs": [1e3 * window for window in windows]}
        return _row({"batch": batch, "context": context} | runs, batch, seconds, limit)

    def profile(self, engine: Engine, batch: int) -> dict[str, Any]:
        """Run ten steps under torch.profiler. Returns the time of each kernel per step, and the idle share.

        The trace is kept next to the results.
        """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.gpu else [])) as recorded:
            for _ in range(10):
                engine.step()
        trace = self.results.with_name("gpu_profile.json")
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        with open(trace, "rb") as plain, gzip.open(f"{trace}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
        kinds = ("kernel", "gpu_memcpy", "gpu_memset") if self.gpu else ("cpu_op",)
        chosen = [event for event in events if event.get("cat") in kinds and event.get("ph") == "X"]
        totals: dict[str, float] = {}
        for event in chosen:
            totals[event["name"]] = totals.get(event["name"], 0.0) + event["dur"] / 1e3 / 10
        busy, gaps = gpu_report.busy_and_gaps([(event["ts"], event["dur"]) for event in chosen])
        return {
            "gap": gaps / (busy + gaps) if self.gpu and chosen else None,
            "busy_ms_per_step": busy / 1e4,
            "kernels_per_step": len(chosen) / 10,
            "ms_per_step": dict(sorted(totals.items(), key=lambda item: -item[1])[:25]),
        }

    def prefill(self, engine: Engine, length: int) -> dict[str, Any]:
        """Measure the time from a prompt to its first token, alone: the median of three after one."""
        rng, times = random.Random(length), []
        for _ in range(4):
            engine.add(self.prompt(rng, length), max_tokens=1)
            begin = time.perf_counter()
            while engine.scheduler.requests or engine.in_flight:
                engine.step()
            times.append(time.perf_counter() - begin)
        seconds, limit = statistics.median(times[1:]), gpu_report.prefill_limit(self.spec, length, self.matmul_rate)
        return _row({"length": length}, length, seconds, limit)

    # ---- the workload

    def workload(self, seed: int) -> list[tuple[list[int], int]]:
        """Return (prompt, number of tokens to generate) of every request."""
        rng = random.Random(seed)
        prompts = [self.prompt(rng, rng.randint(*self.lengths)) for _ in range(self.num_requests)]
        return [(prompt, rng.randint(*self.lengths)) for prompt in prompts]

    def offline(self) -> None:
        """Run the workload through `LLM`, all requests at once. A first run with other prompts compiles and records."""
        from quire.server.offline.llm import LLM
        from quire.server.offline.params import SamplingParams

        with LLM(str(self.folder), **self.settings()) as llm:
            for seed in (1, 0):
                requests = self.workload(seed)
                params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for _, count in requests]
                begin = time.perf_counter()
                outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                check_number(num_tokens, sum(count for _, count in requests))
                print(f"{self.name} offline, seed {seed}: {num_tokens / seconds:.0f} tokens/s", flush=True)
        self.note(offline={"requests": len(requests), "output_tokens": num_tokens, "seconds": seconds})

    def http(self) -> None:
        """Run the workload through HTTP, streamed, and measure the seconds from the command to readiness and to the
        first token. Random weights are made on the device.
        """
        self.note(startup=asyncio.run(self.serve(self.folder, ["--load-format", "dummy"], with_load=True)))

    async def serve(self, folder: Path, flags: list[str], with_load: bool) -> dict[str, float]:
        from quire.cli.bench.datasets import Sample
        from quire.cli.bench.load import Target, run_load, send
        from quire.cli.bench.process import ServerProcess, free_port
        from quire.cli.bench.report import summarize

        command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", "{port}", "--device", self.device]
        command += ["--dtype", "bfloat16", "--max-model-len", str(self.max_model_len), "--record-graphs", "start"]
        command += ["--served-model-name", "measured", *flags]
        with ServerProcess(command, free_port(), grace=8) as server:
            ready = await server.wait_for("/health", timeout=280)
            target = Target(server.client, "/v1/completions", "measured", ignore_eos=True, temperature=0.6)
            asked = time.perf_counter() - server.started
            first = await send(target, Sample("The first words of this server are", 7, 2))
            if first.error:
                raise RuntimeError(f"{first.error}\n{server.log_tail()}")
            stages = {"ready": ready, "first token": asked + first.ttft}
            print(f"{self.name}: {stages}", flush=True)
            for seed in (1, 0) if with_load else ():
                # token ids are sent as they are
                samples = [Sample(prompt, len(prompt), count) for prompt, count in self.workload(seed)]
                results, seconds = await run_load(target, samples, [0.0] * len(samples), None, lambda result: None)
                figures = summarize(results, seconds, [99.0], {})
                if errors := [result.error for result in results if result.error]:
                    raise RuntimeError(f"{errors[0]}\n{server.log_tail()}")
                check_number(figures["total_output_tokens"], sum(sample.output_len for sample in samples))
                print(f"{self.name} http, seed {seed}: {figures['output_throughput']:.0f} tokens/s", flush=True)
            if with_load:
                kept = {name: value for name, value in figures.items() if name.endswith("_ms") and math.isfinite(value)}
                kept |= {"output_tokens": figures["total_output_tokens"], "seconds": seconds}
                self.note(http={"requests": len(samples)} | kept)
            return stages

    # ---- from files

    def files(self) -> None:
        """Measure a start from safetensors files that were just written, so they are in the page cache."""
        folder = self.folder.with_name(self.name + "-weights")
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(self.folder / file, folder / file)
        self.write_weights(folder)
        try:
            self.note(startup_from_files=asyncio.run(self.serve(folder, [], with_load=False)))
        finally:
            shutil.rmtree(folder)

    def write_weights(self, folder: Path) -> None:
        """Write random weights in files of about 4 GB, with the index of a real checkpoint."""
        import torch
        from safetensors.torch import save_file

        from quire.worker.models.registry import build_model

        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in build_model(self.spec, torch.bfloat16, torch.device("meta")).named_parameters():
            parts = getattr(parameter, "parts", None) or []
            shapes |= {part.name: tuple(part.shape) for part in parts} or {name: tuple(parameter.shape)}
        options = {"device": self.device, "dtype": torch.bfloat16}
        index, tensors, size, number = {}, {}, 0, 0
        for i, (name, shape) in enumerate(shapes.items()):
            make = torch.ones if len(shape) == 1 else torch.randn
            tensors[name] = (make(shape, **options) * (1 if len(shape) == 1 else 0.02)).cpu()
            size += tensors[name].nbytes
            if size > 4e9 or i == len(shapes) - 1:
                file = f"model-{number:05}.safetensors"
                save_file(tensors, folder / file)
                index |= dict.fromkeys(tensors, file)
                tensors, size, number = {}, 0, number + 1
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
