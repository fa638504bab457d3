"""The `quire` command, also `python -m quire`."""

from __future__ import annotations

import atexit
import os
import sys


def main() -> int:
    _open_standard_streams()
    _set_home()
    ended: list[int] = []
    serves, early = sys.argv[1:2] == ["serve"], None
    if serves:
        atexit.register(_end, ended)  # the first to be registered runs last
    try:
        if serves:  # first, because its imports take longest
            from quire.server.engines.spawn import early_engine
            from quire.server.frontends.descriptors import raise_descriptor_limit

            raise_descriptor_limit()  # before the engine starts, because it inherits the limit
            early = early_engine(sys.argv[2:])
            from quire.server.heap import collect_rarely

            collect_rarely()
        from quire.cli.main import main as cli_main

        ended.append(cli_main(sys.argv[1:], early))
    except KeyboardInterrupt:
        if not serves:
            raise
        ended.append(0)  # Ctrl-C during the imports, before `server/launch.py` handles signals
    finally:
        if early is not None:
            early.close()
    return ended[0]


def _open_standard_streams() -> None:
    """Open /dev/null in place of each closed one of stdin, stdout and stderr (`quire serve >&- 2>&-`). Otherwise a
    socket or a file would get its number, and the log would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _set_home() -> None:
    """Set HOME to /, as login does, for a user id without an entry in the table of users (`docker run --user 12345`)
    and without HOME. Otherwise `~` would be a folder of that name.
    """
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = "/"


def _end(ended: list[int]) -> None:
    """End at once with this exit code: tearing down the interpreter of a server takes a second on a busy machine."""
    if ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0])


if __name__ == "__main__":
    sys.exit(main())
