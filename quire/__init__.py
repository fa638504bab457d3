"""quire's public face: `from quire import LLM, SamplingParams`, and `python -m quire` / the `quire` command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]

if TYPE_CHECKING:
    from quire.server.offline.llm import LLM, SamplingParams


def __getattr__(name: str):
    if name in __all__:  # imported on first use: the command line must not pay for it
        import quire.server.offline.llm

        return getattr(server.offline, name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def main() -> int:
    from quire.cli.main import main as cli_main

    return cli_main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
