"""The process of a node without a server, `python -m quire.engine.node`, with its configuration on stdin. Runs this
node's ranks for the engine of the first node and restarts them when one ends. Exits when stdin ends. After a further
byte on stdin, exits when a rank ends, because the engine may be shutting down, too, or after --shutdown-timeout.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import wait

from quire.configs import platforms
from quire.configs.config import Config
from quire.engine.executor.multiproc import REFUSED, remote_main
from quire.engine.process import end_with_parent, kill_descendants, read_config, start_logging

PAUSE = 1.0  # seconds before ranks that ended are started again


def run(config: Config) -> int:
    """Run the ranks of this node until stdin ends or has more. Returns 1 if the first node refuses them."""
    context = multiprocessing.get_context("spawn")
    first = config.parallel.node_rank * config.parallel.ranks_per_node
    stdin = sys.stdin.fileno()
    while True:
        joined = context.Event()
        ranks = [
            context.Process(target=remote_main, args=(config, rank, joined), name=f"worker {rank}", daemon=True)
            for rank in range(first, first + config.parallel.ranks_per_node)
        ]
        for rank in ranks:
            rank.start()
        sentinels = [rank.sentinel for rank in ranks]
        ended = wait([stdin, *sentinels])
        if stdin in ended and os.read(stdin, 1) and joined.is_set():
            wait([stdin, *sentinels], config.server.shutdown_timeout)
        for rank in ranks:  # the remaining ranks wait for one that is gone
            rank.kill()
            rank.join()
        if stdin in ended:
            return 0
        if any(rank.exitcode == REFUSED for rank in ranks):
            return 1
        time.sleep(PAUSE)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    platforms.name_process("quire-node")
    config = read_config(sys.stdin.fileno())
    start_logging(config.server, f"node {config.parallel.node_rank}")
    code = run(config)
    kill_descendants()
    os._exit(code)


if __name__ == "__main__":
    main()
