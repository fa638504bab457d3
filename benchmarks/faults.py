"""Measures failures that clients see when a process is killed or stopped, or when the machine has no room.

`python -m benchmarks.faults` prints a table of RELIABILITY.md. Rounds with a full disk or a full /dev/shm give the
server a small file system of its own, by `unshare`; where that is not allowed they say so. Some four minutes; needs
httpx, psutil and Pillow.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from benchmarks.kill_rounds import CHAT, completed, describe, print_rounds, request_of, seconds, serving, start, streams
from benchmarks.kill_rounds import connect as connection_to
from benchmarks.server import ROOT, Server, until

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STOP_SECONDS = 10.0
TCP_REPAIR = 19  # on Linux: a socket in repair mode is closed without a word to the other side
CLOCK = """
import os, time
real = time.time
time.time = lambda: real() + (float(open(os.environ["JUMP"]).read()) if os.path.exists(os.environ["JUMP"]) else 0.0)
"""


def namespace(mounts: dict[str, str]) -> list[str]:
    """Return a command that runs another with file systems of its own, by folder: their sizes."""
    script = "".join(f"mount -t tmpfs -o size={size} none {folder} && " for folder, size in mounts.items())
    return ["unshare", "-rm", "sh", "-c", f'{script}exec "$@"', "sh"]


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([*namespace({folder: "64k"}), "true"], capture_output=True, check=False).returncode == 0


def post(server: Server, path: str = CHAT, **fields: object) -> int | None:
    body = {"messages": HELLO, "max_tokens": 8} | fields
    headers = fields.pop("headers", {})
    body.pop("headers", None)
    try:
        return httpx.post(server.url + path, json=body, headers=headers, timeout=60, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def ended(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def last_line(server: Server) -> str:
    """Return the last line of the log without its time, cut to 160 characters."""
    lines = [line for line in server.log.splitlines() if line.strip()]
    return re.sub(r"^.*?(ERROR|CRITICAL|WARNING) ?", "", lines[-1])[:160] if lines else "nothing"


# ---- processes


def worker_killed() -> str:
    options = ("--distributed-executor-backend", "mp")
    with serving(ROOT, *options, fake=None) as server:
        expected, _ = streams(server, 8, 400)
        worker = lambda: next(p for p in server.children() if p.name().startswith("quire-worker"))  # noqa: E731
        texts, duration = streams(server, 8, 400, lambda: ended(worker()))
        return f"{completed(texts, expected)}, {duration:.1f} s"


def compiler_killed() -> str:
    with serving(ROOT) as server:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        codes = [post(server, response_format=form)]
        for process in server.children("compile_process"):
            process.kill()
        for i in range(5):  # others, so that they have to be compiled
            SCHEMA["properties"][f"b{i}"] = {"type": "integer"}
            codes.append(post(server, response_format=form))
        return f"6 requests with schemas: {describe(codes)}"


def stopped(find: Callable[[Server], psutil.Process], **settings: str | None) -> Callable[[], str]:
    def run() -> str:
        with serving(ROOT, **settings) as server:
            expected, _ = streams(server, 8, 100)

            def stop() -> None:
                process = find(server)
                process.suspend()
                time.sleep(STOP_SECONDS)
                process.resume()

            texts, duration = streams(server, 8, 100, stop)
            return f"{completed(texts, expected)}, {duration:.1f} s; /health then: {server.status()}"

    return run


# ---- no room


def fill(file: Path) -> None:
    """Write until the file system is full."""
    with suppress(OSError), open(file, "wb", buffering=0) as out:
        while out.write(b"x" * 4096):
            pass


def full_disk() -> str:
    """Run a server all of whose files are on a full file system."""
    if not may_mount():
        return "not tried: mounting is not allowed here"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("disk").mkdir()
        keys = folder / "keys.yaml"
        keys.write_text("keys: [{name: free, key: a}, {name: counted, key: b, requests_per_minute: 1000}]")
        disk = folder / "disk"
        options = ["--api-key-file", str(keys), "--key-usage-file", f"{disk}/usage", "--audit-log", f"{disk}/audit"]
        options += ["--batch-dir", f"{disk}/batches", "--responses-store", f"{disk}/responses"]
        options += ["--kv-disk", f"{disk}/kv"]
        with serving(ROOT, *options, prefix=namespace({str(disk): "1m"})) as server:
            inside = Path(f"/proc/{server.process.pid}/root{disk}")
            fill(inside / "filler")
            free, counted = {"headers": {"x-api-key": "a"}}, {"headers": {"x-api-key": "b"}}
            codes = [post(server, **free) for _ in range(5)]
            limited = [post(server, **counted) for _ in range(5)]
            chats = f"chats: {describe(codes)}; of a key with limits: {describe(limited)}"
            return f"{chats}; {uploads_and_responses(server)}; /health: {server.status()}"


def uploads_and_responses(server: Server) -> str:
    """Upload a file, store three responses, read each back, and continue the first."""
    with httpx.Client(base_url=server.url, headers={"x-api-key": "a"}, trust_env=False, timeout=30) as http:
        files = {"file": ("x.jsonl", b"{}\n" * 10_000)}
        upload = http.post("/v1/files", files=files, data={"purpose": "batch"}).status_code
        body = {"input": "x", "store": True, "max_output_tokens": 4}
        made = [http.post("/v1/responses", json=body) for _ in range(3)]
        ids = [one.json()["id"] for one in made if one.status_code == 200]
        read = [http.get(f"/v1/responses/{one}").status_code for one in ids]
        later = [http.post("/v1/responses", json=body | {"previous_response_id": one}).status_code for one in ids[:1]]
        codes = describe([one.status_code for one in made])
        unstored = sum(not one.json()["store"] for one in made if one.status_code == 200)
        stored = f"responses to store: {codes}, {unstored} of which say `store: false`"
        return f"uploads: {upload}; {stored}; read back: {describe(read)}; continued: {describe(later)}"


def full_log() -> str:
    prefix = ["sh", "-c", 'exec "$@" 2>/dev/full >/dev/full', "sh"]
    server = start(ROOT, prefix=prefix)
    try:
        until(lambda: server.status() == 200, 60)
        texts, _ = streams(server, 8, 50)
        return completed(texts)
    finally:
        server.end()


def full_shm() -> str:
    if not may_mount():
        return "not tried: mounting is not allowed here"
    import random

    from benchmarks.soak_traffic import seen
    from tests.server.media.conftest import FAKE, write_seeing_model

    with tempfile.TemporaryDirectory() as folder:
        model = write_seeing_model(Path(folder))
        rng = random.Random(0)
        with serving(ROOT, fake=FAKE, model=model, prefix=namespace({"/dev/shm": "64k"})) as server:
            inside = Path(f"/proc/{server.process.pid}/root/dev/shm/filler")
            fill(inside)
            images = [post(server, messages=seen(rng)) for _ in range(5)]
            inside.unlink()
            after = [post(server, messages=seen(rng)) for _ in range(5)]
            texts = [post(server) for _ in range(5)]
            return f"images: {describe(images)}; texts: {describe(texts)}; images with room again: {describe(after)}"


def few_descriptors() -> str:
    with serving(ROOT, max_files=160) as server:
        connections = [connection_to(server) for _ in range(200)]
        codes = [post(server) for _ in range(5)]
        for connection in connections:
            connection.close()
        return f"chats next to 200 idle connections: {describe(codes)}; then: {describe([post(server)])}"


def little_memory(kilobytes: int, **settings: str | None) -> Callable[[], str]:
    def run() -> str:
        prefix = ["sh", "-c", f'ulimit -v {kilobytes}; exec "$@"', "sh"]
        server = start(ROOT, prefix=prefix, **settings)
        try:
            until(lambda: server.status() == 200 or server.process.poll() is not None, 60)
            if (code := server.exit_code(0.1)) is not None:
                return f"exit code {code}: {last_line(server)}"
            return f"starts; {completed(streams(server, 8, 50)[0])}"
        finally:
            server.end()

    return run


def unwritable_home() -> str:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.yaml")
        keys.write_text("keys: [{name: counted, key: b, requests_per_minute: 1000}]")
        nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"), "/proc/nowhere")
        with serving(ROOT, fake=None, variables=nowhere) as server:
            text = completed(streams(server, 8, 50)[0])
        server = start(ROOT, "--api-key-file", str(keys), fake="", variables=nowhere)
        try:
            return f"{text}; with limits of keys: exit code {server.exit_code(60)}: {last_line(server)}"
        finally:
            server.end()


# ---- clock and network


def clock_jump(jump: float) -> Callable[[], str]:
    def run() -> str:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sitecustomize.py").write_text(CLOCK)
            file = Path(folder, "jump")
            variables = {"PYTHONPATH": f"{folder}:{ROOT}", "JUMP": str(file)}
            with serving(ROOT, variables=variables) as server:
                expected, _ = streams(server, 8, 100)
                texts, duration = streams(server, 8, 100, lambda: file.write_text(str(jump)))
                return f"{completed(texts, expected)}, {duration:.1f} s; /health then: {server.status()}"

    return run


def vanished_clients() -> str:
    """Let clients' machines vanish: no FIN, no RST."""
    with serving(ROOT, fake="step_delay=0.05") as server:
        clients = twenty_requests(server, stream=True)
        try:
            for client in clients:
                client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
                client.close()
        except PermissionError:
            return "not tried: sockets cannot be closed silently here"
        return f"20 streams are ended {seconds(until(lambda: not in_engine(server), 60))}"


def half_open() -> str:
    """Drop every packet of the clients' network; the round runs in a network of its own."""
    inside = [sys.executable, "-m", "benchmarks.faults", "--dropped"]
    script = 'ip link set lo up && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", script, "sh", *inside], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return done.stdout.strip() if done.returncode == 0 else "not tried: no network of its own is allowed here"


def dropped() -> str:
    with serving(ROOT, "--max-num-seqs", "1", fake="step_delay=0.2") as server:
        clients = twenty_requests(server)
        for client in clients:
            port = str(client.getsockname()[1])
            subprocess.run(["iptables", "-A", "INPUT", "-p", "tcp", "--dport", port, "-j", "DROP"], check=True)
        return f"20 waiting requests are ended {seconds(until(lambda: not in_engine(server), 120))}"


def twenty_requests(server: Server, **fields: object) -> list[socket.socket]:
    """Return the connections of 20 requests that the engine has."""
    request = request_of({"messages": HELLO, "max_tokens": 1500, "ignore_eos": True} | fields)
    clients = [connection_to(server, request) for _ in range(20)]
    until(lambda: in_engine(server) == 20, 20)
    return clients


def in_engine(server: Server) -> int:
    load = httpx.get(f"{server.url}/load", trust_env=False, timeout=10).json()
    return load["num_requests_running"] + load["num_requests_waiting"]


ROUNDS: dict[str, tuple[str, Callable[[], str]]] = {
    "worker": ("kill -9 of the worker's process under 8 streams", worker_killed),
    "compiler": ("kill -9 of the processes that compile schemas", compiler_killed),
    "stop-engine": ("engine stopped for 10 s under 8 streams", stopped(Server.engine)),
    "stop-server": ("server stopped for 10 s under 8 streams", stopped(lambda s: psutil.Process(s.process.pid))),
    "disk": ("a full disk below batches, responses, key usage, audit log and KV cache", full_disk),
    "log": ("a full disk below the log", full_log),
    "shm": ("a full /dev/shm", full_shm),
    "descriptors": ("160 descriptors", few_descriptors),
    "memory": ("ulimit -v 300000 at the start", little_memory(300_000)),
    "memory-real": ("ulimit -v 2000000 at the start, with a model", little_memory(2_000_000, fake=None)),
    "home": ("HOME that cannot be written", unwritable_home),
    "clock-on": ("the clock jumps an hour ahead under 8 streams", clock_jump(3600)),
    "clock-back": ("the clock jumps a day back under 8 streams", clock_jump(-86400)),
    "half-open": ("20 clients of waiting requests behind a network that drops all packets", half_open),
    "vanished": ("20 clients of streams vanish without closing their connections", vanished_clients),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", default=",".join(ROUNDS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--dropped", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.dropped:
        print(dropped())
        return 0
    return int(print_rounds(dict(ROUNDS[name] for name in arguments.rounds.split(","))))


if __name__ == "__main__":
    os.environ.pop("FAKE_EXECUTOR", None)
    sys.exit(main())
