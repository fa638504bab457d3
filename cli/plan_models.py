"""Plans models for a server of several: `python -m quire.cli.plan_models` reads settings from stdin and writes one line
of JSON for each. It runs in a separate process because the server does not import torch.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.cli.check import local_settings
from quire.configs.config import Config
from quire.server.models.need import Planned
from quire.server.startup.entry_settings import with_entry
from quire.worker.messages import WorkerReady


def main() -> int:
    """Answer until stdin closes."""
    logging.disable(logging.WARNING)
    while (config := _next(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(msgspec.json.encode(planned(config)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _next(stream: BinaryIO) -> Config | None:
    size = stream.read(4)
    if len(size) < 4:
        return None
    return msgspec.msgpack.decode(stream.read(int.from_bytes(size, "big")), type=Config)


def planned(config: Config) -> Planned:
    """Return the plan of a model, or the error if it cannot be planned."""
    preview = importlib.import_module("quire.worker.startup.preview").preview
    process = _private_bytes()
    target = ""
    try:
        with tempfile.TemporaryDirectory(prefix="quire-plan-") as target:
            local, _, _ = local_settings(with_entry(config), target)
            ready: WorkerReady = preview(local)
    except (ValueError, OSError) as error:
        return Planned(error=str(error).replace(target, config.model.model) if target else str(error))
    plan = ready.plan
    ranks = config.parallel.world_size
    fixed = plan.weights + plan.activations + plan.graphs + plan.states + plan.images + plan.adapters + plan.offload
    return Planned(
        weights=plan.weights,
        others=fixed - plan.weights,
        process=process * ranks if plan.shares_ram else 0,
        kv_cache=plan.kv_cache,
        bytes_per_token=plan.bytes_per_block // ready.block_size if ready.block_size else 0,
        max_model_len=ready.max_model_len,
        total=plan.total,
        available=plan.available,
        shares_ram=plan.shares_ram,
        pooling=list(ready.pooling.tasks) if ready.pooling is not None else [],
        generates=ready.pooling is None or ready.pooling.generates,
        images=ready.media is not None and not ready.media.audio,
        transcribes=ready.media is not None and ready.media.audio,
    )


@functools.cache
def _private_bytes() -> int:
    """Return the RAM that this process shares with no other process after importing an engine's modules; 0 where the
    system does not report it (Linux does).
    """
    importlib.import_module("quire.worker.worker")
    try:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
