"""`--headless`: a node that runs ranks for the engine of another machine, and serves nothing itself."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys

import msgspec

from quire.checkpoints import hub
from quire.configs.config import Config
from quire.server.engines.process import python_environment
from quire.server.startup.checks import local_config

logger = logging.getLogger(__name__)


def run_node(config: Config) -> int:
    """Run this node's ranks until a signal or a refusal of the first node; returns the exit code. Raises ValueError
    for a model that cannot be had.
    """
    options = config.model
    folder = hub.ready_folder(options.model) or hub.resolve(
        options.model, revision=options.revision, download_dir=options.download_dir, progress=lambda phase, done: None
    )
    config = local_config(config, folder, None, needs_weights=options.load_format != "dummy")
    command = [sys.executable, "-P", "-m", "quire.engine.node"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=python_environment(), process_group=0)

    def end(number: int, frame: object) -> None:
        process.stdin.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    encoded = msgspec.msgpack.encode(config)
    process.stdin.write(len(encoded).to_bytes(4, "big") + encoded)
    process.stdin.flush()
    parallel = config.parallel
    address = f"{parallel.master_addr}:{parallel.master_port}"
    logger.info("node %d of %d: joining %s", parallel.node_rank, parallel.nnodes, address)
    return process.wait()
