"""The `quire` command, also `python -m quire`."""

from __future__ import annotations

import atexit
import os
import sys


def main() -> int:
    ended: list[int] = []
    serves = sys.argv[1:2] == ["serve"]
    if serves:
        atexit.register(_end, ended)  # the first to be registered runs last
    try:
        from quire.cli.main import main as cli_main

        ended.append(cli_main(sys.argv[1:]))
    except KeyboardInterrupt:
        if not serves:
            raise
        ended.append(0)  # Ctrl-C during the imports, before `server/launch.py` handles signals
    return ended[0]


def _end(ended: list[int]) -> None:
    """End at once with this exit code: tearing down the interpreter of a server takes a second on a busy machine."""
    if ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0])


if __name__ == "__main__":
    sys.exit(main())
