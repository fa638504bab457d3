"""Runs two ranks on one GPU, over gloo: NCCL needs a GPU per rank."""

from __future__ import annotations

from quire.worker import worker
from quire.worker.cuda.device import CudaPlatform
from quire.worker.platforms.base import Platform


class SharedGpu(CudaPlatform):
    """Uses the first GPU for every rank."""

    dist_backend = "gloo"

    def __init__(self) -> None:
        super().__init__(0)


class SharedGpuWorker(worker.Worker):
    def initialize(self, progress):
        worker.get_platform = _shared_gpu  # this process has only this worker
        return super().initialize(progress)


def _shared_gpu(device: str, rank: int = 0) -> Platform:
    return SharedGpu()
