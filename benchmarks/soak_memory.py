"""Measures the growth of a server's resident memory under many requests of one kind.

    python -m benchmarks.soak_memory [--kind conversations|images|schemas] [--count 5000] [serve flags]

Each request differs from all others. The first fifth warms up, which has to fill the KV cache, so it is small unless
--kv-cache-memory-bytes sets it; then a line is fitted through the resident memory of each process. Exits with 1 if a
process grows by more than --limit MB per 1,000 requests.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys

from benchmarks.server import Server, serving

KINDS = ("conversations", "images", "schemas")
KV_CACHE = "32M"
MAX_SAMPLES = 50


def request_of(kind: str, number: int) -> tuple[str, dict]:
    """Return path and body of request `number`: a stored conversation, an image or a schema, all different."""
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
    """Return the slope of the least-squares line through (x, y)."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


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
        with serving(flags) as server:
            for name, (size, growth) in soak(server, kind, args.count).items():
                print(f"{kind:<14} {name:<28} {size:8.1f} MB {growth:+8.2f} MB per 1,000 requests", flush=True)
                grows |= growth > args.limit
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
