"""Measures losses of clients when processes are killed, stopped or signalled, and when connections are abused. Prints
the tables of RELIABILITY.md.

python benchmarks/kill_rounds.py [--tree FOLDER] [--rounds NAME,...]

Needs httpx and psutil, and some four minutes. FOLDER is another checkout of quire, to compare with. The engine has the
fake executor, which computes nothing: 20 ms a step, and a request's tokens depend on the request alone. Every
load is bounded in number and time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # works without an installation

from benchmarks.server import LATE, ROOT, Server, until
from quire.configs.sources import EMBEDDED_MODEL
from tests.helpers.engine.fake_executor import BACKEND

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
UPLOAD = HEAD.encode() + b"60000000\r\n\r\n"  # the rest of this body is never sent


def start(
    tree: Path,
    *flags: str,
    model: str = str(EMBEDDED_MODEL),
    fake: str | None = "step_delay=0.02",
    variables: Mapping[str, str] = MappingProxyType({}),
    **settings: Any,
) -> Server:
    """Start a server. `fake` are the options of the fake executor; None: the real one."""
    command = [model, "--max-model-len", "2048", "--max-num-seqs", "64"]
    if fake is not None:
        command += ["--distributed-executor-backend", BACKEND]
        variables = {**variables, "FAKE_EXECUTOR": fake}
    return Server([*command, *flags], tree=tree, variables=variables, **settings)


@contextmanager
def serving(tree: Path, *flags: str, **settings: Any) -> Iterator[Server]:
    """Run a server until the block ends."""
    server = start(tree, *flags, **settings)
    try:
        until(lambda: "ready in " in server.log and server.status() == 200, 60)
        yield server
    finally:
        server.end()


def streams(
    server: Server, count: int, num_tokens: int, disturb: Callable[[], object] = lambda: None
) -> tuple[list[str], float]:
    """Return the texts of `count` concurrent streams, "" for one that did not end with [DONE], and the seconds until
    the last ended. `disturb` runs one second after the start.
    """

    async def one(http: httpx.AsyncClient, number: int) -> str:
        body = {"messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": num_tokens}
        body |= {"ignore_eos": True, "seed": number, "stream": True}
        text, done = "", False
        with suppress(httpx.HTTPError):
            async with http.stream("POST", CHAT, json=body) as answer:
                async for line in answer.aiter_lines():
                    event = json.loads(line[6:]) if line.startswith("data: {") else {}
                    text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
                    done = (done or line == "data: [DONE]") and "error" not in event
                    if "error" in event:
                        return ""
        return text if done else ""

    async def everybody() -> list[str]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False, limits=limits) as http:
            tasks = [asyncio.create_task(one(http, number)) for number in range(count)]
            await asyncio.sleep(1.0)
            await asyncio.to_thread(disturb)
            return await asyncio.gather(*tasks)

    start = time.monotonic()
    return asyncio.run(everybody()), time.monotonic() - start


def completed(texts: list[str], expected: list[str] | None = None) -> str:
    """Return how many streams were completed, and how many with the expected text."""
    text = f"{sum(map(bool, texts))} of {len(texts)} streams completed"
    if expected is None:
        return text
    return f"{text}, {sum(bool(a) and a == b for a, b in zip(texts, expected, strict=True))} with the same text"


def gone(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def connect(server: Server, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(LATE)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def request_of(body: dict[str, Any]) -> bytes:
    """Return a chat request as it goes over a connection."""
    content = json.dumps(body).encode()
    return f"{HEAD}{len(content)}\r\n\r\n".encode() + content


def is_open(connection: socket.socket) -> bool:
    """Return whether the server keeps the connection open. Discards received data."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def describe(codes: list[int | None]) -> str:
    return ", ".join(f"{codes.count(code)} x {code or 'no answer'}" for code in dict.fromkeys(codes))


def seconds(value: float | None) -> str:
    return "never" if value is None else f"after {value:.1f} s"


def print_rounds(rounds: Mapping[str, Callable[[], str]]) -> bool:
    """Print a table of rounds as they end; returns whether one failed."""
    print("| round | what clients saw |\n|---|---|")
    failed = False
    for text, run in rounds.items():
        try:
            result = run()
        except Exception as error:
            failed, result = True, f"the round failed: {type(error).__name__}: {error}"
        print(f"| {text} | {result} |", flush=True)
    return failed


# ---- kill rounds


def engine_killed(tree: Path) -> str:
    with serving(tree) as server:
        expected, _ = streams(server, 24, 200)
        texts, duration = streams(server, 24, 200, lambda: server.engine().kill())
        return f"{completed(texts, expected)}, {duration:.1f} s"


def group_terminated(tree: Path) -> str:
    with serving(tree, "--shutdown-timeout", "6", fake="step_delay=0.02,load_delay=12") as server:

        def terminate() -> None:
            for process in (psutil.Process(server.process.pid), *server.children()):
                process.terminate()

        texts, _ = streams(server, 16, 150, terminate)
        return f"{completed(texts)}, exit code {server.exit_code()}"


def server_killed(tree: Path) -> str:
    with serving(tree) as server:
        children = server.children()

        def kill() -> None:
            server.process.kill()
            server.process.wait()

        streams(server, 24, 200, kill)
        ended = until(lambda: all(map(gone, children)), 20)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        when = "at once" if ended is not None and ended < 0.1 else seconds(ended)
        return f"engine gone {when}, {len(list((server.folder / 'tmp').iterdir()))} files left"


def frontend_killed(tree: Path) -> str:
    with serving(tree, "--api-server-count", "2") as server:
        victim = server.children("quire.server.frontends.member")[0]
        texts, _ = streams(server, 24, 200, victim.kill)
        replaced = until(lambda: len(server.children("quire.server.frontends.member")) == 2, 20)
        return f"{completed(texts)}, the others were its own; replaced: {'no' if replaced is None else 'yes'}"


def frontend_stopped(tree: Path) -> str:
    with serving(tree, "--api-server-count", "2") as server:
        victim = server.children("quire.server.frontends.member")[0]
        victim.suspend()
        replaced = until(lambda: gone(victim), 15)
        until(lambda: len(server.children("quire.server.frontends.member")) == 2, 5)
        time.sleep(3)
        return f"replaced {seconds(replaced)}; 30 times /health then: {describe([server.status() for _ in range(30)])}"


def engine_stopped(tree: Path) -> str:
    with serving(tree) as server:
        answers = []

        def stop() -> None:
            engine = server.engine()
            engine.suspend()
            stopped = time.monotonic()
            answers.append(until(lambda: server.status() == 503, 30))
            answers.append(time.monotonic() - stopped)
            engine.resume()

        texts, _ = streams(server, 4, 200, stop)
        return f"/health 503: {seconds(answers[0])}; {completed(texts)} after it was continued"


def stalled_readers(tree: Path) -> str:
    with serving(tree, "--shutdown-timeout", "5", fake="") as server:
        body = {"messages": [{"role": "user", "content": "a"}], "n": 16, "max_tokens": 1500, "stream": True}
        request = request_of(body | {"ignore_eos": True, "logprobs": True, "top_logprobs": 20})
        readers = [connect(server, request, receive_buffer=4096) for _ in range(3)]
        time.sleep(2)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.exit_code()
        for reader in readers:
            reader.close()
        return f"exit code {code} after {time.monotonic() - start:.1f} s"


# ---- connections


def idle_connections(tree: Path) -> str:
    with serving(tree, max_files=256) as server:
        connections = [connect(server) for _ in range(300)]
        codes = [server.status() for _ in range(5)]
        size = server.log_path.stat().st_size
        server.engine().kill()
        again = until(lambda: "is ready again" in server.log or server.process.poll() is not None, 20)
        replaced = "the server ended" if server.process.poll() is not None else "replaced " + seconds(again)
        for connection in connections:
            connection.close()
        return f"/health: {describe(codes)}; log {size / 1000:,.0f} kB; engine killed meanwhile: {replaced}"


def slowloris(tree: Path) -> str:
    with serving(tree) as server:
        heads = [connect(server, f"POST {CHAT} HTTP/1.1\r\nHost:".encode()) for _ in range(200)]
        bodies = [connect(server, UPLOAD + b" " * 100_000) for _ in range(20)]
        time.sleep(40)
        counts = [sum(map(is_open, group)) for group in (heads, bodies)]
        return f"open after 40 s: {counts[0]} of 200 half-sent headers, {counts[1]} of 20 stalled bodies"


def uploads(tree: Path) -> str:
    """Send 20 times 8 uploads of 60 MB; refused ones are closed by the client."""
    with serving(tree) as server:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        connections = []
        for _ in range(20):
            connections.append(connect(server, UPLOAD))
            with suppress(OSError):
                connections[-1].sendall(b" " * 8_000_000)
        time.sleep(1)
        during = process.memory_info().rss
        time.sleep(39)
        after = process.memory_info().rss
        return f"{before >> 20} MiB before, {during >> 20} with the uploads, {after >> 20} after 40 s"


KILLS = {
    "engine": ("kill -9 of the engine under 24 streams", engine_killed),
    "group": ("SIGTERM to all under 16 streams; an engine loads for 12 s, --shutdown-timeout 6", group_terminated),
    "server": ("kill -9 of the server under 24 streams", server_killed),
    "frontend": ("kill -9 of one of two frontends under 24 streams", frontend_killed),
    "stopped": ("one of two frontends stopped", frontend_stopped),
    "stalled": ("engine stopped under 4 streams", engine_stopped),
    "readers": ("SIGTERM with 3 clients that do not read, --shutdown-timeout 5", stalled_readers),
}
CONNECTIONS = {
    "idle": ("300 idle connections, 256 descriptors", idle_connections),
    "slowloris": ("200 half-sent headers, 20 stalled bodies", slowloris),
    "uploads": ("20 stalled uploads of 8 of 60 MB: resident memory of the server", uploads),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose server is measured (default: this one)")
    names = ",".join([*KILLS, *CONNECTIONS])
    parser.add_argument("--rounds", default=names, help="comma-separated (default: %(default)s)")
    arguments = parser.parse_args(argv)
    wanted, tree = arguments.rounds.split(","), arguments.tree.resolve()
    for title, rounds in (("Kill rounds", KILLS), ("Connections", CONNECTIONS)):
        print(f"## {title}\n")
        print_rounds({text: partial(run, tree) for name, (text, run) in rounds.items() if name in wanted})
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
