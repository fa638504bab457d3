"""Select the platform for `--device`."""

from __future__ import annotations

import torch

from quire.worker.cpu.device import CpuPlatform
from quire.worker.cuda.device import CudaPlatform
from quire.worker.platforms.base import Platform


def get_platform(device: str, rank: int = 0) -> Platform:
    """Return the platform for `--device` auto, cpu or cuda. Raises ValueError if the device is not available."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return CpuPlatform()
    if device != "cuda":
        raise ValueError(f"--device {device!r} is not supported: set it to auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch finds no CUDA device; set --device cpu, or check the driver and that torch is a "
            "CUDA build"
        )
    if rank >= torch.cuda.device_count():
        raise ValueError(
            f"rank {rank} has no GPU: torch finds {torch.cuda.device_count()}; lower --tensor-parallel-size"
        )
    return CudaPlatform(rank)
