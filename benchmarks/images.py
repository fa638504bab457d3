"""Measures how long streams of text wait for the images of other requests, in this process, without HTTP.

    python benchmarks/images.py [--streams 4] [--images 8] [--side 512] [--whole-budget]

The model has the shapes of Qwen3-VL-2B with 8 of its 28 decoder layers, and random weights. While the streams decode, a
request with half of the images arrives, and then one request per image. Prints the time of steps without images, of the
longest encoder batch, and the longest gap between two tokens of a stream, which is the longest step: it should be at
most the sum of the two others. `--whole-budget` encodes as many images in a step as the step has tokens, as without a
limit of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from PIL import Image
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.configs.config import Config
from quire.engine.executor.base import get_executor
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import AddRequest, MediaItem, SamplingParams
from quire.engine.scheduler import Scheduler
from quire.server.media.registry import load_processor

IMAGE_ID = 151655
TEXT = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
    "rope_theta": 5000000,
}
VISION = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}
CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE_ID,
    "tie_word_embeddings": True,
    "text_config": TEXT | {"tie_word_embeddings": True},
    "vision_config": VISION,
    "dtype": "bfloat16",
}
PREPROCESSOR = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}


class Bench:
    """The engine's loop; `steps` gets (seconds, seconds of encoding, whether a stream got a token) of every step."""

    def __init__(self, folder: Path, whole_budget: bool):
        config = Config.from_flat(
            model=str(folder), device="cpu", load_format="dummy", max_model_len="8192", kv_cache_memory_bytes=1 << 30
        )
        self.executor = get_executor(config)
        ready = self.executor.initialize(lambda phase, fraction: None)
        if whole_budget:
            budget = ready.max_num_batched_tokens
            ready = msgspec.structs.replace(ready, media=msgspec.structs.replace(ready.media, encoder_budget=budget))
        print(f"encoder budget: {ready.media.encoder_budget} embeddings of a step of {ready.max_num_batched_tokens}")
        kv = KVCacheManager(ready.num_blocks, ready.block_size, True, ready.groups, ready.max_num_batched_tokens)
        self.scheduler = Scheduler(config.scheduler, ready, kv)
        self.steps: list[tuple[float, float, bool]] = []
        self.encoding, encoder = 0.0, self.executor._worker.runner.images.encoder
        encode = encoder.encode

        def timed(items: list[MediaItem]) -> dict[str, str]:
            start = time.perf_counter()
            errors = encode(items)
            self.encoding = time.perf_counter() - start
            assert not errors, errors
            return errors

        encoder.encode = timed

    def step(self) -> None:
        self.encoding, start = 0.0, time.perf_counter()
        step = self.scheduler.schedule()
        outputs = self.scheduler.update(step, self.executor.execute(step.input).result())
        streamed = any(output.request_id.startswith("text") for batch in outputs.values() for output in batch)
        self.steps.append((time.perf_counter() - start, self.encoding, streamed))

    def add(self, name: str, token_ids: list[int], num_tokens: int, media: list[MediaItem]) -> None:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add(AddRequest(name, token_ids, sampling, media=media))


def write_image(folder: Path, seed: int, side: int) -> MediaItem:
    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    image = load_processor(folder)([Image.fromarray(noise)], {})[0]
    path = folder / f"{seed}.safetensors"
    save_file(image.features, path)
    return MediaItem(str(seed), 0, image.counts[0], image.counts[0], str(path), image.grid)


def prompt(images: list[MediaItem]) -> tuple[list[int], list[MediaItem]]:
    """Five tokens before each image, and ten at the end."""
    token_ids, media = [], []
    for image in images:
        token_ids += range(100, 105)
        media.append(msgspec.structs.replace(image, offset=len(token_ids)))
        token_ids += [IMAGE_ID] * image.length
    return [*token_ids, *range(200, 210)], media


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--whole-budget", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
        bench = Bench(folder, args.whole_budget)
        images = [write_image(folder, seed, args.side) for seed in range(args.images + 1)]
        bench.add("warm", *prompt(images[-1:])[:1], 2, prompt(images[-1:])[1])
        for i in range(args.streams):
            bench.add(f"text{i}", list(range(10 + i, 42 + i)), 10_000 // args.streams, [])
        for _ in range(30):
            bench.step()
        plain = [seconds for seconds, *_ in bench.steps[-20:]]
        bench.steps.clear()
        half = args.images // 2
        bench.add("many", prompt(images[:half])[0], 4, prompt(images[:half])[1])
        for i in range(half, args.images):
            bench.add(f"one{i}", prompt(images[i : i + 1])[0], 4, prompt(images[i : i + 1])[1])
        while any(request_id[:4] != "text" for _, request_id in bench.scheduler.requests):
            bench.step()
        bench.executor.shutdown()
    assert all(streamed for *_, streamed in bench.steps), "a step gave the streams no token"
    encoding = [encoding for _, encoding, _ in bench.steps if encoding]
    others = [seconds - encoding for seconds, encoding, _ in bench.steps]
    print(f"{args.streams} streams, {args.images} images of {args.side} x {args.side} ({images[0].num_embeds} tokens)")
    print(f"step without images, median            {median(plain):.3f} s")
    print(f"encoder batches                        {len(encoding)}, longest {max(encoding):.3f} s")
    print(f"rest of a step with a prompt, longest  {max(others):.3f} s")
    print(f"longest gap between tokens             {max(seconds for seconds, *_ in bench.steps):.3f} s")
    print(f"all images at once would take          {sum(encoding):.3f} s")


main()
