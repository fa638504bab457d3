"""Measures the cost of a decode step in the engine's process, without model, workers and HTTP: scheduling it, updating
the requests with its tokens, and encoding both for the other processes.

python benchmarks/host_cost.py [--streams 256] [--steps 300] [--block-size 16] [--profile]

Prints the median and the 99th percentile of each part in milliseconds of CPU time. The goal is at most 0.6 ms in all
for 256 streams: less than a step of any model, so that with two steps in flight the device never waits for the engine.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.configs.config import Config
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import AddRequest, SamplingParams, StepOutputs
from quire.engine.scheduler import Scheduler
from tests.helpers.engine.fake_executor import FakeExecutor, FakeOptions

PARTS = "schedule", "encode step", "update", "encode outputs"


class Engine:
    """The scheduler with an executor that computes nothing. Steps are timed, except the executor."""

    def __init__(self, streams: int, steps: int, block_size: int) -> None:
        blocks = streams * (-(-(steps + 128) // block_size) + 2)
        config = Config.from_flat(
            model="fake", device="cpu", distributed_executor_backend="fake", max_num_seqs=streams,
            max_model_len=str(steps + 200), num_gpu_blocks_override=blocks, block_size=block_size,
            max_num_batched_tokens=max(8192, streams),
        )  # fmt: skip
        self.executor = FakeExecutor(config, FakeOptions(validate=False))
        ready = self.executor.ready
        kv = KVCacheManager(ready.num_blocks, ready.block_size)
        self.scheduler, self.encoder = Scheduler(config.scheduler, ready, kv), msgspec.msgpack.Encoder()
        sampling = SamplingParams(max_tokens=steps + 100, ignore_eos=True, temperature=0.7, top_p=0.9)
        for i in range(streams):
            prompt = [(31 * i + 7 * j) % 900 for j in range(20 + i % 40)]
            self.scheduler.add(AddRequest(f"cmpl-{i:032x}-0", prompt, sampling), b"client")
        while self.scheduler.waiting:
            self.step()

    def step(self) -> list[float]:
        """Run a step; returns the seconds of CPU time of each of `PARTS`."""
        clock = time.thread_time  # other processes do not count
        times = [clock()]
        step = self.scheduler.schedule()
        times.append(clock())
        self.encoder.encode(step.input)
        times.append(clock())
        result = self.executor.execute(step.input).result()
        start = clock()
        outputs = self.scheduler.update(step, result)
        updated = clock()
        for client_outputs in outputs.values():
            self.encoder.encode(StepOutputs(client_outputs))
        return [times[1] - times[0], times[2] - times[1], updated - start, clock() - updated]


def measure(streams: int, steps: int, block_size: int) -> dict[str, list[float]]:
    """Return seconds of each step, by part and in all."""
    engine = Engine(streams, steps, block_size)
    gc.collect()
    gc.freeze()  # as the engine does when it is ready
    rows = [engine.step() for _ in range(steps)]
    gc.unfreeze()
    return dict(zip(PARTS, map(list, zip(*rows, strict=True)), strict=True)) | {"all": [sum(row) for row in rows]}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--profile", action="store_true", help="print the functions that take longest")
    arguments = parser.parse_args(argv)
    sizes = arguments.streams, arguments.steps, arguments.block_size
    if arguments.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, *sizes)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return 0
    print(f"{arguments.streams} streams, {arguments.steps} steps, blocks of {arguments.block_size} tokens")
    for name, seconds in measure(*sizes).items():
        print(f"{name:>15}: {1e3 * median(seconds):.3f} ms, p99 {1e3 * quantiles(seconds, n=100)[-1]:.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
