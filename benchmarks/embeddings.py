"""Compares `LLM.embed` with sentence-transformers on texts of mixed lengths, one after the other, in turn.

    python benchmarks/embeddings.py MODEL [--num-prompts 64] [--min-len 8] [--max-len 512] [--rounds 2] [--threads N]
                                          [--dtypes bfloat16 float32]

MODEL is a folder with modules.json; `--write-modules METHOD` adds one to a folder of `make_model.py`. Lengths are
log-uniform. Prints tokens per second and CPU seconds, which neighbours on a busy machine change less, and compares the
embeddings.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--min-len", type=int, default=8)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="of sentence-transformers")
    parser.add_argument("--write-modules", metavar="METHOD", help="lasttoken or mean")
    args = parser.parse_args()
    if args.write_modules:
        write_modules(Path(args.model), args.write_modules)

    import psutil
    import torch
    from sentence_transformers import SentenceTransformer

    from quire import LLM

    torch.set_num_threads(args.threads)
    process = psutil.Process()
    with LLM(args.model, num_threads=args.threads, max_model_len="auto", kv_cache_memory_bytes=1 << 30) as llm:
        texts = mixed_texts(llm.tokenizer.decode, args)
        num_tokens = sum(len(llm.tokenizer.encode(text)) for text in texts)
        models: dict[str, Callable[[], torch.Tensor]] = {
            "quire": lambda: torch.tensor([one.outputs.embedding for one in llm.embed(texts)])
        }
        for dtype in args.dtypes:
            model = SentenceTransformer(args.model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
            models[f"sentence-transformers {dtype}"] = lambda model=model: model.encode(
                texts, convert_to_tensor=True, show_progress_bar=False
            ).float()
        print(f"{len(texts)} texts, {num_tokens} tokens, {args.threads} threads", flush=True)
        found: dict[str, torch.Tensor] = {}
        for _ in range(args.rounds):
            for name, embed in models.items():
                llm.reset_prefix_cache()
                start, cpu = time.perf_counter(), cpu_seconds(process)
                found[name] = embed()
                seconds, cpu = time.perf_counter() - start, cpu_seconds(process) - cpu
                print(f"{name}: {num_tokens / seconds:.0f} tok/s, {seconds:.1f} s, {cpu:.1f} CPU s", flush=True)
        for name, embeddings in found.items():
            cosine = torch.nn.functional.cosine_similarity(embeddings, found["quire"])
            print(f"{name}: least cosine with quire's {cosine.min():.5f}")
    return 0


def mixed_texts(decode: Callable[[list[int]], str], args: argparse.Namespace) -> list[str]:
    """Texts of about log-uniform lengths in tokens."""
    generator = random.Random(0)
    low, high = math.log(args.min_len), math.log(args.max_len)
    lengths = [round(math.exp(generator.uniform(low, high))) for _ in range(args.num_prompts)]
    return [decode([generator.randrange(1000, 20000) for _ in range(length)]) for length in lengths]


def cpu_seconds(process: object) -> float:
    """Of this process and its children."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def write_modules(folder: Path, method: str) -> None:
    """The files of sentence-transformers for pooling by `method` and normalization."""
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"embedding_dimension": width, "pooling_mode": method}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


if __name__ == "__main__":
    sys.exit(main())
