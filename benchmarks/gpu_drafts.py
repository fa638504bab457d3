"""Measures the cost of verifying drafts on a GPU: `python benchmarks/gpu_drafts.py [--device cuda] [--results FILE]
MODEL`.

For steps of m tokens: milliseconds with one token each of m requests, which replay one CUDA graph, and of one request
that verifies m - 1 drafts, which runs in pieces. Drafts of which a share p is right then give (1 + m p) tokens in the
second time instead of one token in the first. The model is one of benchmarks/gpu_models.py with random weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks import gpu_report
from benchmarks.gpu import Engine
from benchmarks.gpu_models import write_model
from quire.configs.config import Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "gpu.json")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quire-gpu-models")
    parser.add_argument("model")
    arguments = parser.parse_args()
    folder = write_model(arguments.model, arguments.folder)
    engine = Engine(
        Config.from_flat(
            model=str(folder),
            device=arguments.device,
            load_format="dummy",
            max_model_len="1024",
            max_num_seqs=64,
            speculative_config='{"method": "auto"}',
        )
    )
    engine.work_idle()
    measured = engine.executor._worker.runner.measurement
    found = [
        {"tokens": size, "decode_ms": 1e3 * seconds, "verify_ms": 1e3 * measured.of_one[size]}
        for size, seconds in measured.seconds.items()
    ]
    engine.executor.shutdown()
    gpu_report.update(arguments.results, models={arguments.model: {"drafts": found}})
    for row in found:
        print("{tokens:3} tokens: {decode_ms:.2f} ms of so many requests, {verify_ms:.2f} ms of one".format(**row))


if __name__ == "__main__":
    main()
