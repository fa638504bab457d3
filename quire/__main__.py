"""The `quire` command, also `python -m quire`."""

from __future__ import annotations

import sys


def main() -> int:
    from quire.cli.main import main as cli_main

    return cli_main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
