"""Implements `quire bench audio`, which measures transcription by a running server. The real-time factor is seconds of
work per second of audio: less is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import random
import struct
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.cli.bench.connection import Client, HttpError
from quire.cli.bench.datasets import positive_int
from quire.cli.bench.plot import add_plot_flag, plot_transcriptions, require_plot
from quire.cli.bench.report import percentile
from quire.cli.bench.serve import concurrencies, find_model, percentiles, positive_float
from quire.cli.chat import add_tls_flag
from quire.cli.main import Parser
from quire.server.startup.bar import Bar

ROUTE = "/v1/audio/transcriptions"
_BOUNDARY = "quire-bench-7MA4YWxkTrZu0gW"
_RATE = 16_000
_PITCHES = range(100, 3000)  # Hz, of generated tones


class _Usage(msgspec.Struct, frozen=True):
    seconds: float = 0.0


class _Answer(msgspec.Struct):
    text: str
    usage: _Usage = _Usage()


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class Sound:
    name: str
    data: bytes
    seconds: float | None  # None: read from the server's answer


@dataclass(slots=True)
class Result:
    """Records one request; `latency` and `audio` are in seconds."""

    latency: float = 0.0
    audio: float = 0.0
    characters: int = 0
    error: str | None = None


def parser() -> Parser:
    result = Parser(
        prog="quire bench audio",
        usage="quire bench audio [FILE...] [flags]",
        description="Measure a running server's transcription of files: real-time factor and latency.",
    )
    result.add_argument("files", nargs="*", metavar="FILE", help="audio, sent in turn (default: generated tones)")
    result.add_argument("--base-url", "--url", metavar="URL", help="URL of the server (default: http://HOST:PORT)")
    result.add_argument("--host", default="127.0.0.1", help="host of the server (default: 127.0.0.1)")
    result.add_argument("--port", type=positive_int, default=8000, metavar="N", help="its port (default: 8000)")
    result.add_argument("--model", metavar="NAME", help="model name in requests (default: the first of /v1/models)")
    result.add_argument("--api-key", metavar="KEY", help="API key of the server")
    add_tls_flag(result)
    result.add_argument("--num-prompts", type=positive_int, metavar="N", help="requests (default: one per file, or 8)")
    result.add_argument(
        "--max-concurrency",
        type=concurrencies,
        default=[1],
        metavar="N[,N...]",
        help="concurrent requests; several numbers make a sweep (default: 1)",
    )
    result.add_argument(
        "--seconds", type=positive_float, default=30.0, metavar="S", help="length of generated tones (default: 30)"
    )
    result.add_argument("--language", metavar="CODE", help="what is spoken (default: detected)")
    result.add_argument("--temperature", type=float, metavar="T", help="one attempt at it (default: several)")
    result.add_argument(
        "--metric-percentiles",
        type=percentiles,
        default=[50.0, 90.0, 99.0],
        metavar="P[,P...]",
        help="percentiles to report (default: 50,90,99)",
    )
    result.add_argument("--result-filename", metavar="FILE", help="write the figures as JSON")
    add_plot_flag(result, "the real-time factor over the sweep")
    result.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    return result


def main(argv: list[str]) -> int:
    """Run `quire bench audio ARGV...`; returns 1 if a request failed."""
    flags = parser()
    arguments = flags.parse_args(argv)
    try:
        require_plot(arguments.plot)
        runs = asyncio.run(_measure(arguments))
        if arguments.result_filename:
            Path(arguments.result_filename).write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
        if arguments.plot:
            plot_transcriptions(runs, arguments.plot)
    except (ValueError, OSError, RuntimeError) as error:
        flags.exit(1, f"{flags.prog}: error: {error}\n")
    return 1 if any(run["failed"] for run in runs) else 0


def read_sounds(files: Sequence[str], count: int | None, seconds: float) -> list[Sound]:
    """Return the audio of each request. Raises OSError."""
    if not files:
        return [Sound("tones.wav", tones(seed, seconds), seconds) for seed in range(count or 8)]
    found = [Sound(Path(name).name, data := Path(name).read_bytes(), wav_seconds(data)) for name in files]
    return [found[i % len(found)] for i in range(count or len(found))]


def wav_seconds(data: bytes) -> float | None:
    """Return the length of a WAV file; None for other files."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            return file.getnframes() / file.getframerate()
    except (wave.Error, EOFError):
        return None


def tones(seed: int, seconds: float) -> bytes:
    """Return a WAV file of a new tone every fifth of a second."""
    rng, samples = random.Random(seed), []
    for _ in range(math.ceil(seconds * 5)):
        pitch = rng.choice(_PITCHES)
        samples += [round(8000 * math.sin(2 * math.pi * pitch * i / _RATE)) for i in range(_RATE // 5)]
    samples = samples[: round(seconds * _RATE)]
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        out.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return file.getvalue()


def form(sound: Sound, fields: dict[str, str]) -> bytes:
    """Return the body of a request."""
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    name = sound.name.replace('"', "")
    parts.append(
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    return "".join(parts).encode() + sound.data + f"\r\n--{_BOUNDARY}--\r\n".encode()


async def _measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one run for each number of --max-concurrency. Raises RuntimeError when the first request fails."""
    sounds = read_sounds(arguments.files, arguments.num_prompts, arguments.seconds)
    url = (arguments.base_url or f"http://{arguments.host}:{arguments.port}").rstrip("/").removesuffix("/v1")
    client = Client(url, arguments.api_key, arguments.insecure)
    with contextlib.closing(client):
        model, _ = await find_model(client, arguments.model)
        given = {"language": arguments.language, "temperature": arguments.temperature}
        fields = {"model": model} | {name: str(value) for name, value in given.items() if value is not None}
        first = await _send(client, sounds[0], fields)
        if first.error:
            raise RuntimeError(f"the first request failed: {first.error}")
        return [await _run(client, sounds, fields, limit, arguments) for limit in arguments.max_concurrency]


async def _run(
    client: Client, sounds: list[Sound], fields: dict[str, str], limit: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    gate = asyncio.Semaphore(limit)
    with Bar(total=len(sounds), desc=f"concurrency {limit}", disable=arguments.disable_tqdm, unit="file") as bar:

        async def one(sound: Sound) -> Result:
            async with gate:
                result = await _send(client, sound, fields)
            bar.update()
            return result

        start = time.perf_counter()
        results = await asyncio.gather(*map(one, sounds))
        duration = time.perf_counter() - start
    figures = {"model_id": fields["model"], "max_concurrency": limit} | summarize(
        results, duration, arguments.metric_percentiles
    )
    print(render(figures), flush=True)
    for error in sorted({result.error for result in results if result.error})[:5]:
        print(error)
    return figures


async def _send(client: Client, sound: Sound, fields: dict[str, str]) -> Result:
    """Send one request. A failure is a Result with `error`, never an exception."""
    start, kind = time.perf_counter(), f"multipart/form-data; boundary={_BOUNDARY}"
    try:
        response, connection = await client.request("POST", ROUTE, form(sound, fields), kind)
        try:
            body = await response.read()
        finally:
            client.release(connection)
        if response.status != 200:
            raise HttpError(f"HTTP {response.status}: {body.decode(errors='replace')[:500]}")
        answer = _decode(body)
    except (HttpError, OSError, EOFError, asyncio.LimitOverrunError, msgspec.DecodeError, ValueError) as error:
        return Result(error=f"{type(error).__name__}: {error}")
    seconds = answer.usage.seconds if sound.seconds is None else sound.seconds
    if not seconds:
        return Result(error=f"the length of {sound.name} is unknown: it is no WAV, and the answer has no usage")
    return Result(time.perf_counter() - start, seconds, len(answer.text))


def summarize(results: Sequence[Result], duration: float, wanted: Sequence[float]) -> dict[str, Any]:
    """Return the figures of one run: of all audio together, and percentiles over requests."""
    good = [result for result in results if result.error is None]
    audio = sum(result.audio for result in good)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "audio_seconds": audio,
        "characters": sum(result.characters for result in good),
        "rtf": duration / audio if audio else math.nan,
        "audio_throughput": audio / duration,
    }
    latencies = sorted(1000 * result.latency for result in good)
    factors = sorted(result.latency / result.audio for result in good)
    for percent in wanted:
        figures[f"p{percent:g}_latency_ms"] = percentile(latencies, percent)
        figures[f"p{percent:g}_request_rtf"] = percentile(factors, percent)
    return figures


_TITLES = {
    "max_concurrency": "Concurrency",
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "audio_seconds": "Audio (s)",
    "characters": "Characters of text",
    "rtf": "Real-time factor, all together",
    "audio_throughput": "Audio per second (s)",
}


def render(figures: dict[str, Any]) -> str:
    """Return the figures as a readable table."""
    rows = [(title, figures[name]) for name, title in _TITLES.items()]
    for key, value in figures.items():
        percent, _, rest = key.partition("_")
        title = {"latency_ms": "latency (ms)", "request_rtf": "real-time factor of a request"}.get(rest)
        if title:
            rows.append((f"{percent.upper()} {title}", value))
    shown = ((title, f"{value:.3f}" if isinstance(value, float) else str(value)) for title, value in rows)
    return "\n".join(["=" * 56, *(f"{title:<40} {value:>15}" for title, value in shown), "=" * 56])
