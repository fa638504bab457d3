"""DeepSeek-OCR at full size with random weights: its encoder against transformers', and folders for measuring its
decoder.

    python benchmarks/ocr.py encoder [--dtype bfloat16] [--side 1024] [--pages 1] [--rounds 3]
    python benchmarks/ocr.py folders OUT_DIR
    quire bench latency OUT_DIR/experts --load-format dummy --language-model-only
    quire bench latency OUT_DIR/dense --load-format dummy --language-model-only

`encoder` prints seconds of encoding pages in turn: quire, transformers, quire ... (transformers has the same network as
Unlimited-OCR). Of the folders, `experts` is the published model, and `dense` has MLPs as wide as the experts that a
token passes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.worker.layers.linear import Linear
from quire.worker.models.vision.deepseek_ocr import DeepseekOCRTower
from quire.worker.platform import get_platform
from quire.worker.weights.checkpoint import Placement
from quire.worker.weights.random_weights import DummyWeights

ROOT = Path(__file__).parent.parent
_TEXT = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 1280,
    "intermediate_size": 6848,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 896,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 10,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 12,
    "num_key_value_heads": 10,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_mla": False,
    "vocab_size": 129280,
}
_CONFIG = {
    "architectures": ["DeepseekOCRForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "language_config": _TEXT,
    "vision_config": {"image_size": 1024},
}
_DENSE = _TEXT | {"first_k_dense_replace": 12, "intermediate_size": 8 * 896}


def write_folders(out: Path) -> None:
    """Write config.json and a tokenizer, without weights, of both models."""
    for name, text in (("experts", _TEXT), ("dense", _DENSE)):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(_CONFIG | {"language_config": text}, indent=2))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "configs" / "quire-tiny" / file, folder)


def make_quire(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """quire's encoder: bytes `[n, side, side, 3]` to embeddings."""
    platform = get_platform("cpu")
    platform.start(torch.get_num_threads(), 1, wait_for_kernels=True)
    torch.set_default_dtype(dtype)
    tower = DeepseekOCRTower(_CONFIG).eval()
    torch.set_default_dtype(torch.float32)
    weights = DummyWeights(0)
    for parameter in tower.parameters():
        for part in parameter.parts:
            weights.fill(Placement(part, parameter), False)
    for module in tower.modules():
        if hasattr(module, "use"):
            module.use(platform.ops)
    for module in tower.modules():
        if isinstance(module, Linear):
            module.finalize()
    return lambda pixels: tower.encode([{"pixel_values": page[None]} for page in pixels])


def make_transformers(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' encoder of Unlimited-OCR and its projector."""
    from transformers.models.unlimited_ocr.configuration_unlimited_ocr import UnlimitedOcrVisionConfig
    from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrVisionModel

    torch.set_default_dtype(dtype)
    model = UnlimitedOcrVisionModel(UnlimitedOcrVisionConfig()).eval()
    projector = torch.nn.Linear(2048, 1280)
    torch.set_default_dtype(torch.float32)
    return lambda pixels: projector(model((pixels.permute(0, 3, 1, 2).float() / 127.5 - 1).to(dtype)).last_hidden_state)


def measure_encoder(dtype: torch.dtype, side: int, pages: int, rounds: int) -> None:
    """Print the seconds and CPU seconds of encoding, in turn."""
    pixels = torch.randint(0, 256, (pages, side, side, 3), dtype=torch.uint8)
    runs = {"quire": make_quire(dtype), "transformers": make_transformers(dtype)}
    best = dict.fromkeys(runs, (float("inf"), float("inf")))
    with torch.inference_mode():
        for i in range(rounds + 1):  # the first one warms up
            for name, run in runs.items():
                started, used = time.perf_counter(), time.process_time()
                run(pixels)
                seconds = time.perf_counter() - started, time.process_time() - used
                if i:
                    print(f"{name}: {seconds[0]:.2f} s, {seconds[1]:.2f} s of CPU time", flush=True)
                    best[name] = min(best[name], seconds)
    ratio = best["transformers"][0] / best["quire"][0]
    print(f"{pages} x {side} x {side}, {dtype}, {torch.get_num_threads()} threads: transformers / quire {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    encoder = commands.add_parser("encoder")
    encoder.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    encoder.add_argument("--side", type=int, default=1024)
    encoder.add_argument("--pages", type=int, default=1)
    encoder.add_argument("--rounds", type=int, default=3)
    commands.add_parser("folders").add_argument("out", type=Path)
    given = parser.parse_args()
    if given.command == "folders":
        write_folders(given.out)
    else:
        measure_encoder(getattr(torch, given.dtype), given.side, given.pages, given.rounds)


if __name__ == "__main__":
    main()
