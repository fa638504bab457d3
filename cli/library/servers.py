"""Implements `quire ps` and `quire stop` for the servers of this user on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from quire.checkpoints.library.names import same_model
from quire.checkpoints.sizes import format_bytes
from quire.cli.api_client import Server, ServerError
from quire.cli.health import Unhealthy, address_of
from quire.cli.library.table import age, aligned
from quire.cli.main import Parser
from quire.server.startup.running_servers import Running, folder, is_running, running

POLL_SECONDS = 0.1
ASK_TIMEOUT = 4.0  # seconds for a server to list its models
_STARTED = "the servers of this user on this machine"


def ps(argv: list[str]) -> int:
    """Run `quire ps ARGV...`; returns 1 if --url names no server."""
    parser = Parser(prog="quire ps", description=f"List {_STARTED}: those that `quire serve` and `quire run` started.")
    parser.add_argument("--url", "--base-url", metavar="URL", help="only this server, which may be another user's")
    parser.add_argument("--json", action="store_true", help="print JSON; memory is in bytes, since in seconds")
    arguments = parser.parse_args(argv)
    found = running()
    try:
        if arguments.url:
            found = _at(found, arguments.url) or [_asked(arguments.url)]
    except (ServerError, Unhealthy) as error:
        print(f"quire ps: error: {error}", file=sys.stderr)
        return 1
    rows = [_facts(one) for one in found]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(aligned([("PID", "URL", "MODEL", "MEMORY", "SINCE"), *map(_row, rows)]))
    return 0


def stop(argv: list[str]) -> int:
    """Run `quire stop ARGV...`; returns 1 if there is no such server, or it still runs at --timeout."""
    parser = Parser(
        prog="quire stop",
        description="Stop a server: it answers no new requests, finishes those in flight, and ends. The command waits "
        "for that; Ctrl-C stops waiting.",
    )
    parser.add_argument(
        "server", nargs="?", metavar="SERVER", help="pid, URL or model of `quire ps` (default: the one)"
    )
    parser.add_argument("--url", "--base-url", metavar="URL", help="the same as a URL")
    parser.add_argument("--all", action="store_true", help=f"stop all of {_STARTED}")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds to wait (default: until it has ended)")
    arguments = parser.parse_args(argv)
    if sum((bool(arguments.server), bool(arguments.url), arguments.all)) > 1:
        parser.error("give one of SERVER, --url and --all")
    try:
        chosen = running() if arguments.all else [_chosen(arguments.server or arguments.url)]
        for server in chosen:
            os.kill(server.pid, signal.SIGTERM)
        return _wait(chosen, arguments.timeout)
    except (ServerError, Unhealthy, OSError) as error:
        print(f"quire stop: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("not waiting any longer; the server ends when its requests are finished", file=sys.stderr)
        return 130


def _wait(servers: list[Running], timeout: float | None) -> int:
    started = time.monotonic()
    for server in servers:
        while is_running(server):
            if timeout is not None and time.monotonic() - started > timeout:
                raise ServerError(f"{server.url} (pid {server.pid}) still finishes its requests after {timeout:g} s")
            time.sleep(POLL_SECONDS)
        print(f"stopped {server.url} (pid {server.pid})")
    return 0


def _chosen(name: str | None) -> Running:
    """Return the server that `name` means: a pid, a URL or a model; without one the only server. Raises ServerError."""
    found = running()
    if name is None:
        matching = found
    elif name.isdigit():
        matching = [one for one in found if one.pid == int(name)]
    else:
        matching = [one for one in found if same_model(name, one.models) in one.models] or _at(found, name)
    if len(matching) == 1:
        return matching[0]
    known = "; ".join(f"{one.pid} {one.url} {', '.join(one.models)}" for one in matching or found)
    which = "several servers" if matching else f"no server {name}" if name and found else "no server"
    raise ServerError(f"{which} among {_STARTED} ({folder()})" + (f": {known}" if known else ""))


def _at(found: list[Running], url: str) -> list[Running]:
    """Return the servers at a URL, whatever its spelling. Raises Unhealthy for an invalid URL."""
    if "/" not in url and ":" not in url:
        return []
    wanted = _place(address_of(url))
    return [one for one in found if _place(address_of(one.url)) == wanted]


def _place(address: str) -> str:
    return address.rpartition("://")[2].replace("localhost:", "127.0.0.1:")


def _asked(url: str) -> Running:
    """Return a server as its API describes it. Raises ServerError."""
    server = Server(url, os.environ.get("QUIRE_API_KEY"), ASK_TIMEOUT, insecure=True)
    with server.request("GET", "/models") as response:
        return Running(0, url, [card["id"] for card in json.load(response)["data"]], "")


def _facts(server: Running) -> dict:
    return {
        "pid": server.pid or None,
        "url": server.url,
        "models": server.models,
        "memory": _memory(server.pid) if server.pid else None,
        "since": _seconds(server.started) if server.started else None,
    }


def _row(facts: dict) -> tuple[str, ...]:
    memory, since = facts["memory"], facts["since"]
    return (
        str(facts["pid"] or "-"),
        facts["url"],
        ", ".join(facts["models"]),
        format_bytes(memory) if memory else "-",
        "-" if since is None else f"{age(since)} ago",
    )


def _seconds(started: str) -> float:
    up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(up - int(started) / os.sysconf("SC_CLK_TCK"), 0.0)


def _memory(pid: int) -> int | None:
    """Return the proportional set size of a server and its processes in bytes; None if the system has none."""
    total = 0
    for process in (pid, *_descendants(pid)):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        except OSError:  # the process ended meanwhile
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total or None


def _descendants(pid: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    waiting = [pid]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found
