"""Measures decode steps with 0, 1 and 8 LoRA adapters in this process, without engine and HTTP.

    python benchmarks/lora.py MODEL [--streams 1 8 32] [--adapters 0 1 8] [--rank 16] [--context 128] [--prompt 512]
    [--rounds N] [--cpu-time] [--load-format dummy] [--quantization int8|int4] [--device cpu|cuda]

MODEL is a folder; with `--load-format dummy` its config.json is enough. The adapters are random, for all linear layers.
Streams take turns to choose one; steps of all numbers of adapters take turns, so that other work of the machine
slows all of them; `--cpu-time` counts the CPU time of one thread, which a busy machine changes least. Prints medians,
or with `--cpu-time` the least, in milliseconds per step, and per prompt of `--prompt` tokens, and how much longer than
without an adapter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.worker_steps import BLOCK, Rows, num_groups, start_worker
from quire.checkpoints.lora_files import content_hash
from quire.worker.messages import LoraUse, SamplingParams
from quire.worker.worker import Worker


def write_adapters(worker: Worker, folder: Path, number: int, rank: int) -> list[LoraUse]:
    """Write random adapters for every linear layer of the model, in bfloat16."""
    uses = []
    for i in range(number):
        tensors, generator = {}, torch.Generator().manual_seed(i)
        for (layer, name), (piece, *_) in worker.runner.adapters.targets.pieces.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for side, shape in (("A", (rank, piece.in_features)), ("B", (piece.out_features, rank))):
                matrix = torch.randn(shape, generator=generator) / 100
                tensors[f"{module}.lora_{side}.weight"] = matrix.bfloat16()
        place = folder / str(i)
        place.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        (place / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, place / "adapter_model.safetensors")
        uses.append(LoraUse(content_hash(place), str(place)))
    return uses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--adapters", nargs="+", type=int, default=[0, 1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, without waiting")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    most, longest = max(args.streams), max(args.context + 1, args.prompt + 1)
    flags = {
        "model": args.model,
        "num_threads": 1 if args.cpu_time else None,
        "device": args.device,
        "load_format": args.load_format,
        "quantization": args.quantization,
        "max_num_seqs": most * len(args.adapters),
        "max_num_batched_tokens": max(2048, args.prompt),
        "enable_lora": True,
        "max_loras": max(8, *args.adapters),
        "max_lora_rank": args.rank,
    }
    blocks = (most * -(-(args.context + 1) // BLOCK) + -(-longest // BLOCK) + 1) * num_groups(**flags)
    worker = start_worker(**flags, max_model_len=str(longest), num_gpu_blocks_override=blocks)
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(worker, Path(folder), max(args.adapters), args.rank)
        loads = {f"{number} streams": (number, args.context, 1) for number in args.streams}
        loads[f"prompt of {args.prompt}"] = 1, 0, args.prompt
        print(f"{worker.runner.platform.ops.name} kernels, {torch.get_num_threads()} threads, rank {args.rank}")
        print("| ms per step | " + " | ".join(f"{number} adapters" for number in args.adapters) + " |")
        print("|---" * (len(args.adapters) + 1) + "|")
        for load, (number, context, count) in loads.items():
            shape = number, context + count, context
            streams = [
                Rows(worker, i * most, *shape, sampling=SamplingParams(temperature=0.0), adapters=adapters[:num])
                for i, num in enumerate(args.adapters)
            ]
            for one in streams:
                one.run(count)
            times = [[1e3 * one.run(count, clock) for one in streams] for _ in range(args.rounds)]
            if args.cpu_time:
                typical = [min(column) for column in zip(*times)]
                ratios = [one / typical[0] for one in typical]
            else:
                typical = [median(column) for column in zip(*times)]
                ratios = [median(each / row[0] for each, row in zip(column, times)) for column in zip(*times)]
            cells = (f"{ms:.1f} ({100 * ratio - 100:+.0f} %)" for ms, ratio in zip(typical, ratios))
            print(f"| {load} | " + " | ".join(cells) + " |", flush=True)
    worker.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
