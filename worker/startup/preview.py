"""The start of a worker without weights, for `quire check`."""

from __future__ import annotations

from quire.configs.config import Config
from quire.worker.messages import WorkerReady
from quire.worker.startup.plan import estimated, plan
from quire.worker.startup.ranks import Ranks
from quire.worker.startup.ready import ready
from quire.worker.startup.resolve import resolve
from quire.worker.weights.loader import check_model


def preview(config: Config, *, files: bool = False) -> WorkerReady:
    """Estimate what a worker would report, from config.json and the memory that is free now. With `files`, the headers
    of the weights are compared with it.

    Raises ValueError as the worker would: both run the same stages, and this one compares where the worker loads.
    """
    ranks = Ranks(config)
    resolved = resolve(config, ranks, preview=True)
    check_model(config, files=files)
    return ready(resolved, plan(resolved, estimated(resolved), ranks))
