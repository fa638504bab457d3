"""Measures steps of a model that is split over ranks, and the recovery from an engine's death. Random weights: only the
sizes of the model matter.

python benchmarks/parallel.py [--size 0.6b|tiny] [--num-reqs 1,8] [--steps 64]      (needs psutil; on a machine that
does nothing else)

Decode steps through scheduler, executor and workers, without HTTP: one process, a worker process, two tensor-parallel
ranks, two pipeline stages; the same cores for all. Then a server whose engine is killed with SIGKILL while it streams:
seconds until /health says so, until it is 200 again, and until the stream goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from quire.cli.bench.process import ServerProcess, free_port
from quire.configs.config import Config
from quire.configs.sources import EMBEDDED_MODEL
from quire.engine.executor.base import get_executor, steps_in_flight
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import AddRequest, SamplingParams
from quire.engine.scheduler import Scheduler

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
SIZES = {
    "0.6b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "uniproc": {},
    "mp": {"distributed_executor_backend": "mp"},
    "TP = 2": {"tensor_parallel_size": 2},
    "PP = 2": {"pipeline_parallel_size": 2},
}
PROMPT_LEN = 128


def settings(folder: str) -> dict[str, Any]:
    return {
        "model": folder,
        "load_format": "dummy",
        "device": "cpu",
        "max_model_len": "1024",
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 2048,
    }


def decode_steps(folder: str, placement: dict[str, Any], num_reqs: int, num_steps: int) -> float:
    """Median milliseconds from one token of every request to the next."""
    config = Config.from_flat(**settings(folder), **placement)
    executor = get_executor(config)
    try:
        ready = executor.initialize(lambda phase, fraction: None)
        scheduler = Scheduler(
            config.scheduler,
            ready,
            KVCacheManager(ready.num_blocks, ready.block_size),
            config.parallel.pipeline_parallel_size,
        )
        for i in range(num_reqs):
            scheduler.add(
                AddRequest(
                    str(i), [i + 1] * PROMPT_LEN, SamplingParams(max_tokens=num_steps, temperature=0.0, ignore_eos=True)
                )
            )
        in_flight, times = deque(), []
        while scheduler.requests or in_flight:
            if len(in_flight) < steps_in_flight(config, ready) and (step := scheduler.schedule()):
                in_flight.append((step, executor.execute(step.input)))
                continue
            step, pending = in_flight.popleft()
            outputs = scheduler.update(step, pending.result())
            if any(output.request_id == "0" and output.new_token_ids for batch in outputs.values() for output in batch):
                times.append(time.perf_counter())
        return 1000 * statistics.median(b - a for a, b in pairwise(times))
    finally:
        executor.shutdown()


async def recovery(folder: str, tokenizer: str) -> tuple[float, float, float]:
    """Seconds from an engine's death until /health reports it, until it is 200 again, until the stream continues."""
    port = free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings(folder).items() if name != "model"]
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        folder,
        "--tokenizer",
        tokenizer,
        "--port",
        str(port),
        "--served-model-name",
        "m",
        "--generation-config",
        "vllm",
        *flags,
    ]
    with ServerProcess(command, port) as server:
        await server.wait_for("/health", timeout=300)
        words = list(
            range(300, 1200)
        )  # ids that have a text in the small tokenizer: tokens without text make no events
        body = {
            "model": "m",
            "prompt": "Once upon a time",
            "max_tokens": 800,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "allowed_token_ids": words,
        }
        response, _ = await server.client.request("POST", "/v1/completions", json.dumps(body).encode())
        events = response.events()
        for _ in range(5):
            await anext(events)
        (engine,) = [
            child for child in psutil.Process(server.process.pid).children() if "quire.engine.core" in child.cmdline()
        ]
        os.kill(engine.pid, signal.SIGKILL)
        killed = time.perf_counter()

        async def until(status: int) -> float:
            while (await server.client.fetch("GET", "/health"))[0] != status:
                await asyncio.sleep(0.01)
            return time.perf_counter() - killed

        async def resumed() -> float:
            """The first event after a pause: events that were on their way arrive without one."""
            last = killed
            async for _ in events:
                now = time.perf_counter()
                if now - last > 0.5:
                    return now - killed
                last = now
            raise RuntimeError("the stream ended without a pause")

        going_on = asyncio.create_task(resumed())
        return await until(503), await until(200), await going_on


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.6b", help="shapes of the model (default: 0.6b)")
    parser.add_argument("--num-reqs", default="1,8", help="numbers of requests, comma-separated (default: 1,8)")
    parser.add_argument("--steps", type=int, default=64, help="number of steps (default: 64)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SIZES[arguments.size]))
        for num_reqs in map(int, arguments.num_reqs.split(",")):
            for name, placement in PLACEMENTS.items():
                print(
                    (
                        f"{num_reqs:>3} requests  {name:<8} "
                        f"{decode_steps(folder, placement, num_reqs, arguments.steps):>8.2f} ms per token"
                    ),
                    flush=True,
                )
        seen, ready, resumed = asyncio.run(recovery(folder, str(EMBEDDED_MODEL)))
        print(
            f"engine killed: /health 503 after {seen:.2f} s, 200 after {ready:.2f} s, the stream went on after "
            f"{resumed:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
