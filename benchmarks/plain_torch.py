"""Compares steps without native kernels (plain torch) with those of the kernels, in turn, on one core.

    python benchmarks/plain_torch.py MODEL [--level amx|avx512bf16|avx512|avx2] [--loads 1x128 8x128 512] [--rounds N]

Each way is a process that keeps its model. Prints the least CPU time of a step in milliseconds, and their ratio. Plain
torch is confined to the instructions of `--level`, as far as oneDNN and torch can be. Loads are as for `step.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

ONEDNN = {"avx512bf16": "AVX512_CORE_BF16", "avx512": "AVX512_CORE_VNNI", "avx2": "AVX2"}
WARM_UP = 20  # steps of decode before the first that counts: the copies of weights are made in them


def confine(level: str) -> None:
    """Let torch use the instructions of `level` only. Called before torch is imported."""
    if level in ONEDNN:
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN[level]
    if level == "avx2":
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    import torch

    torch.set_num_threads(1)
    if level != "amx":
        torch.cpu._is_amx_tile_supported = lambda: False
    if level in ("avx512", "avx2"):
        torch.cpu._is_avx512_bf16_supported = lambda: False


def serve(pipe: Connection, model: str, level: str, is_plain: bool, loads: list[str]) -> None:
    """Answer each load from `pipe` by the CPU seconds of a step of it."""
    confine(level)
    from benchmarks.step import fill_cache, parse_load
    from benchmarks.worker_steps import BLOCK, Rows, num_groups, start_worker
    from quire.checkpoints.gguf.folder import gguf_folder
    from quire.worker.cpu.native import KERNELS
    from quire.worker.messages import SamplingParams

    sizes = {load: parse_load(load) for load in loads}
    flags = {
        "model": gguf_folder(model) if model.endswith(".gguf") else model,
        "device": "cpu",
        "dtype": "bfloat16",
        "num_threads": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
    }
    if is_plain:
        KERNELS.load = lambda *args, **options: False
    else:
        flags["cpu_level"] = level
        KERNELS.load(background=False, level=level)
    longest = max(2048, *(context + count for _, context, count in sizes.values()))
    blocks = max(number * -(-(context + count) // BLOCK) + 1 for number, context, count in sizes.values())
    room = max(longest // BLOCK + 1, blocks) * num_groups(**flags)
    worker = start_worker(**flags, max_model_len=str(longest), num_gpu_blocks_override=room)
    fill_cache(worker)
    pipe.send(KERNELS.status)
    current, rows = "", None
    while load := pipe.recv():
        number, context, count = sizes[load]
        if load != current:
            current = load
            rows = Rows(worker, 0, number, context + count, context, sampling=SamplingParams(temperature=0.0))
            for _ in range(WARM_UP if count == 1 else 1):
                rows.run(count)
        pipe.send(rows.run(count, time.thread_time))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--level", default="amx", choices=("amx", *ONEDNN))
    parser.add_argument("--loads", nargs="+", default=["1x128", "8x128", "512"])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    context, pipes = multiprocessing.get_context("spawn"), []
    for is_plain in (False, True):
        own, other = context.Pipe()
        given = (other, args.model, args.level, is_plain, args.loads)
        context.Process(target=serve, args=given, daemon=True).start()
        print(own.recv(), flush=True)
        pipes.append(own)
    for load in args.loads:
        best = [float("inf")] * 2
        for _ in range(args.rounds if "x" in load else max(3, args.rounds // 10)):
            for i, pipe in enumerate(pipes):
                pipe.send(load)
                best[i] = min(best[i], pipe.recv())
        native, plain = best
        print(f"{load:>8s}  native {native * 1e3:.1f}  plain {plain * 1e3:.1f}  ratio {plain / native:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
