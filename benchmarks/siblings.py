"""Measures models of new kinds next to siblings of the same sizes that attend to all keys, with random weights.

    python benchmarks/siblings.py [--models glm-5 deepseek-v3 ...] [--contexts 2048 8192] [--rounds N] [--threads N]
    [--cpu-time]

Prints for each model the bytes of its weights, and for each context the KiB that the caches of a request take per
token, the least milliseconds of a token, and the prompt tokens per second of the last 2,048. Steps are those of a
worker in this process, in bfloat16; caches hold what the prompt wrote.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.worker_steps import BLOCK, Rows, start_worker
from quire.configs.config import Config
from quire.worker.messages import SamplingParams, WorkerReady, most_blocks
from quire.worker.startup.preview import preview

CHUNK = 2048
_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 512}
_LATENT = {
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,  # steps without drafts
} | _EXPERTS
_LINEAR = {
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
# name -> (model_type, architecture, changed sizes)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        {"layer_types": ["full_attention" if i % 3 == 2 else "conv" for i in range(8)]}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "lfm3": ("lfm3", "Lfm3ForCausalLM", {"head_dim": 64}),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS | {"num_experts": 32, "head_dim": 64}),
    "qwen3-next": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _EXPERTS | _LINEAR | {"num_experts": 32, "head_dim": 64, "shared_expert_intermediate_size": 512},
    ),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3ForCausalLM", _LATENT),
    "glm-5": (
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        _LATENT | {"index_topk": 1024, "index_head_dim": 128, "index_n_heads": 16},
    ),
    "ling-3": (
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        _LATENT
        | {"num_experts": 32, "num_experts_per_token": 4, "num_expert_group": 1, "layer_group_size": 4}
        | {"head_dim": 64},
    ),
}


def write_config(name: str, folder: str) -> None:
    kind, architecture, changes = MODELS[name]
    config = CONFIG_MAPPING[kind](**_SIZES | changes)
    config.architectures = [architecture]
    config.save_pretrained(folder)


def cache_bytes(ready: WorkerReady, num_tokens: int) -> int:
    """Return the bytes that a request of so many tokens holds between two steps of output."""
    state = ready.plan.states // ready.num_states if ready.num_states else 0
    return most_blocks(ready.groups, num_tokens, BLOCK, 1) * ready.plan.bytes_per_block + state


def _flags(folder: str, context: int, threads: int) -> dict[str, Any]:
    return {
        "model": folder,
        "device": "cpu",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "num_threads": threads,
        "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": str(context + 4 * BLOCK),
    }


def preview_of(folder: str, context: int, threads: int) -> WorkerReady:
    return preview(Config.from_flat(**_flags(folder, context, threads), block_size=BLOCK))


def measure(
    folder: str, contexts: list[int], rounds: int, threads: int, clock: Callable[[], float]
) -> tuple[WorkerReady, list[tuple[float, float]]]:
    """Return what the worker reports, and the seconds of a token and of the last chunk of the prompt per context."""
    ready = preview_of(folder, max(contexts), threads)
    flags, longest = _flags(folder, max(contexts), threads), ready.max_model_len
    num_blocks = (longest // BLOCK + 2) * len(ready.groups) + 1
    worker, found = start_worker(**flags, num_gpu_blocks_override=num_blocks), []
    Rows(worker, 0, 1, CHUNK, sampling=SamplingParams(temperature=0.0)).run(CHUNK)
    for row, context in enumerate(contexts, 1):
        rows = Rows(worker, row, 1, context + 1, sampling=SamplingParams(temperature=0.0))
        prompt = [rows.run(CHUNK, clock, advance=True) for _ in range(context // CHUNK)]
        rows.run(1)
        found.append((min(rows.run(1, clock) for _ in range(rounds)), prompt[-1]))
    worker.shutdown()
    return ready, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 8192], help=f"multiples of {CHUNK}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="count this process's CPU time; use it with one thread")
    args = parser.parse_args()
    if any(context < CHUNK or context % CHUNK for context in args.contexts):
        parser.error(f"--contexts must be multiples of {CHUNK}")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    print(f"{args.threads} threads")
    print(
        "| | weights, GB | context | cache, KiB per token | ms per token | prompt tokens/s |\n|---|---|---|---|---|---|"
    )
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            write_config(name, folder)
            ready, found = measure(folder, args.contexts, args.rounds, args.threads, clock)
        for context, (token, prompt) in zip(args.contexts, found):
            size = cache_bytes(ready, context) / context / 1024
            print(
                f"| {name} | {ready.plan.weights / 1e9:.2f} | {context} | {size:.1f} | {token * 1e3:.1f} "
                f"| {CHUNK / prompt:.0f} |",
                flush=True,
            )
        time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
