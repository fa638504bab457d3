"""Memory of a worker while it loads a checkpoint of many shards, next to the size of the files.

    python -m benchmarks.loading FOLDER [--quantization int8] [--model-impl transformers]

Writes a Qwen3-MoE of random bfloat16 weights to `FOLDER` (about 3 GB, one tensor per matrix and expert, as on the Hub),
or with `--dense` a Llama of half that size, unless it has a config.json. Anonymous memory is what the worker owns; the
other resident pages are those of the mapped files, which the kernel drops when memory is short.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import torch

from quire.worker.cpu import native
from quire.worker.cpu.device import CpuPlatform
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.weights.loader import load_weights

GB = 1 << 30


def write(folder: Path, dense: bool) -> None:
    """Write a random checkpoint in bfloat16: of Llama's shape if `dense`, else with 64 experts per layer."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    config = LlamaConfig(
        vocab_size=64000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    experts = Qwen3MoeConfig(
        vocab_size=32768,
        hidden_size=2048,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    model = AutoModelForCausalLM.from_config(config if dense else experts, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")


def resident() -> tuple[int, int]:
    """(anonymous bytes, all resident bytes) of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rss, anonymous = (int(lines[key].split()[0]) << 10 for key in ("VmRSS", "RssAnon"))
    return anonymous, rss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--model-impl", default="auto", choices=["auto", "transformers"])
    parser.add_argument("--dense", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.folder / "config.json").is_file():
        write(arguments.folder, arguments.dense)
        return print("written; run again to load")
    files = list(arguments.folder.glob("*.safetensors"))
    peaks, done, platform = [0, 0], threading.Event(), CpuPlatform()
    native.KERNELS.load(background=False)
    spec = read_model_spec(str(arguments.folder), arguments.model_impl)

    def watch() -> None:
        while not done.wait(0.01):
            peaks[:] = map(max, peaks, resident())

    threading.Thread(target=watch).start()
    before, start = resident()[0], time.perf_counter()
    model = build_model(
        spec, torch.bfloat16, torch.device("cpu"), quantization=arguments.quantization, ops=platform.ops
    )
    load_weights(model, spec, str(arguments.folder))
    seconds = time.perf_counter() - start
    done.set()
    after = resident()[0]
    print(f"files {sum(file.stat().st_size for file in files) / GB:.2f} GB in {len(files)} shards, {seconds:.0f} s")
    print(f"anonymous: {before / GB:.2f} GB before, {peaks[0] / GB:.2f} GB at most, {after / GB:.2f} GB after")
    print(f"resident with mapped files: {peaks[1] / GB:.2f} GB at most")


if __name__ == "__main__":
    main()
