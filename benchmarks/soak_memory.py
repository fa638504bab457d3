"""Whether the resident memory of a server's processes stays flat: many requests of one kind, and the slope afterwards.

    python -m benchmarks.soak_memory [--kind conversations|images|schemas] [--count 5000] [serve flags]

Each request differs from all others. The first fifth warms up, which has to fill the KV cache, so it is small unless
--kv-cache-memory-bytes sets it; then a line is fitted through the resident memory of each process. Exits with 1 if a
process grows by more than --limit MB per 1,000 requests.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

KINDS = ("conversations", "images", "schemas")
KV_CACHE = "32M"
MAX_SAMPLES = 50
READY_TIMEOUT = 300.0  # seconds


def request_of(kind: str, number: int) -> tuple[str, dict]:
    """(path, body) of request `number`: a stored conversation, an image or a schema that no other request has."""
    if kind == "conversations":
        return "/v1/responses", {"input": f"Number {number}: " + "word " * 200, "max_output_tokens": 16, "store": True}
    content: object = f"Number {number}."
    extra: dict = {}
    if kind == "images":
        url = f"data:image/png;base64,{base64.b64encode(_png(number)).decode()}"
        content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    else:
        names = {f"field_{number}_{i}": {"type": "integer", "minimum": number} for i in range(8)}
        schema = {"type": "object", "properties": names, "additionalProperties": False}
        extra = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 4} | extra


def _png(number: int) -> bytes:
    from PIL import Image

    image, file = Image.new("RGB", (64, 64), (number % 256, number // 256 % 256, number // 65536)), io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y)."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


class Server:
    """A server in a folder of its own, on a free port of 127.0.0.1."""

    def __init__(self, flags: list[str], folder: Path):
        self.log = open(folder / "log", "w+")  # noqa: SIM115 - closed in `end`
        command = [sys.executable, "-m", "quire", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", self.text())) or not self._is_ready(found[1]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{self.text()}")
            time.sleep(0.2)
        self.url = found[0]

    @staticmethod
    def _is_ready(port: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def text(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def post(self, path: str, body: dict) -> None:
        """Raises urllib.error.HTTPError."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    def resident(self) -> dict[str, float]:
        """MB of each process, by name and number."""
        main = psutil.Process(self.process.pid)
        found = {}
        for process in [main, *main.children(recursive=True)]:
            try:
                found[f"{_role(process, main)}-{process.pid}"] = process.memory_info().rss / 1e6
            except psutil.NoSuchProcess:
                continue  # a process that compiles grammars may be replaced
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def _role(process: psutil.Process, main: psutil.Process) -> str:
    """What the process does: by its name, or the module or script that it runs."""
    if process == main:
        return "server"
    if process.name().startswith("quire"):
        return process.name()
    words = " ".join(process.cmdline())
    return next((word for word in ("compile", "resource_tracker", "decode") if word in words), process.name())


def soak(server: Server, kind: str, count: int) -> dict[str, tuple[float, float]]:
    """Send `count` requests. Returns for each process (MB at the end, MB per 1,000 requests after the warm-up)."""
    every, warm, samples = max(count // MAX_SAMPLES, 1), count // 5, {}
    for number in range(count):
        server.post(*request_of(kind, number))
        if number >= warm and number % every == 0:
            for name, size in server.resident().items():
                samples.setdefault(name, []).append((number / 1000, size))
    return {name: (points[-1][1], slope(points)) for name, points in samples.items() if len(points) > 2}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated (default: all but images)")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--limit", type=float, default=2.0, help="MB per 1,000 requests")
    args, flags = parser.parse_known_args(argv)
    if "--kv-cache-memory-bytes" not in flags:
        flags += ["--kv-cache-memory-bytes", KV_CACHE]
    grows = False
    for kind in args.kind or ("conversations", "schemas"):
        with tempfile.TemporaryDirectory() as folder:
            server = Server(flags, Path(folder))
            try:
                server.wait_ready()
                for name, (size, growth) in soak(server, kind, args.count).items():
                    print(f"{kind:<14} {name:<28} {size:8.1f} MB {growth:+8.2f} MB per 1,000 requests", flush=True)
                    grows |= growth > args.limit
            finally:
                server.end()
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
