"""`--headless`: a node that runs ranks for the engine of another machine, or engines for its server, and serves nothing
itself.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys

import msgspec

from quire.checkpoints import hub
from quire.configs.config import Config
from quire.configs.speculation import draft_model_of
from quire.server.engines.spawn import python_environment
from quire.server.startup.checks import local_config
from quire.server.startup.remote_engines import RemoteEngines

logger = logging.getLogger(__name__)


def run_node(config: Config) -> int:
    """Run this node's ranks or engines until a signal or a refusal of the first node; return the exit code. Raises
    ValueError for a model that cannot be obtained.
    """
    if config.models.are_several:
        raise ValueError("--headless has one model: a server of several models has all engines on its machine")
    options, draft = config.model, draft_model_of(config.scheduler.speculative_config)
    folder = _folder(config, options.model, options.revision)
    needs_weights = options.load_format != "dummy"
    if config.parallel.data_parallel_size > 1:
        draft = None if draft is None else _folder(config, draft, None)
        return RemoteEngines(local_config(config, folder, draft, needs_weights=needs_weights)).run()
    config = local_config(config, folder, None, needs_weights=needs_weights)
    command = [sys.executable, "-P", "-m", "quire.engine.node"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=python_environment(), process_group=0)

    def end(number: int, frame: object) -> None:
        if number == signal.SIGINT or was_asked:
            process.stdin.close()
        else:
            with contextlib.suppress(BrokenPipeError):  # the process has ended
                process.stdin.write(b"\n")
                process.stdin.flush()
        was_asked.append(number)

    was_asked: list[int] = []
    encoded = msgspec.msgpack.encode(config)
    process.stdin.write(len(encoded).to_bytes(4, "big") + encoded)
    process.stdin.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    parallel = config.parallel
    address = f"{parallel.master_addr}:{parallel.master_port}"
    logger.info("node %d of %d: joining %s", parallel.node_rank, parallel.nnodes, address)
    return process.wait()


def _folder(config: Config, model: str, revision: str | None) -> str:
    return hub.ready_folder(model) or hub.resolve(
        model, revision=revision, download_dir=config.model.download_dir, progress=lambda phase, done: None
    )
