"""Sends requests to a server with a given rate and concurrency, and measures the times of the responses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cli.bench.connection import Client, HttpError
from quire.cli.bench.datasets import Sample


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    """Declares the fields of a chunk that the measurement needs, for both endpoints; the decoder skips the others."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Result:
    """Records the times of one request in seconds.

    `itl` holds the gaps between events, which carry one token or, from a server that merges them, more.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Return seconds per output token after the first; None for a single token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Target:
    """Describes the endpoint and the parameters of its requests."""

    client: Client
    endpoint: str
    model: str
    ignore_eos: bool
    temperature: float
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, sample: Sample) -> bytes:
        body = {
            "model": self.model,
            "max_tokens": sample.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": _content(sample)}]
        else:
            body["prompt"] = sample.prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | self.extra)


def _content(sample: Sample) -> str | list[dict[str, Any]]:
    if not sample.images:
        return sample.prompt
    images = [{"type": "image_url", "image_url": {"url": url}} for url in sample.images]
    return [{"type": "text", "text": sample.prompt}, *images]


async def send(target: Target, sample: Sample) -> Result:
    """Send one streamed request. A failure is a Result with `error`, never an exception."""
    result, body = Result(), target.body(sample)
    start = time.perf_counter()
    try:
        response, connection = await target.client.request("POST", target.endpoint, body)
        try:
            if response.status != 200:
                raise HttpError(f"HTTP {response.status}: {(await response.read()).decode(errors='replace')[:500]}")
            await _read_stream(response.events(), result, start)
        finally:
            target.client.release(connection)
    except (
        HttpError,
        OSError,
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,
        msgspec.DecodeError,
        ValueError,
    ) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


async def _read_stream(events: AsyncIterator[bytes], result: Result, start: float) -> None:
    last = 0.0
    num_events = 0
    async for data in events:
        now = time.perf_counter()
        event = _decode(data)
        if event.error is not None:
            raise HttpError(f"error in the stream: {event.error}")
        if event.usage is not None:
            result.prompt_tokens, result.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        if not event.choices or _only_role(event.choices[0]):
            continue
        num_events += 1
        if num_events == 1:
            result.ttft = now - start
        else:
            result.itl.append(now - last)
        last = now
    if not num_events:
        raise HttpError("the stream ended without a token")
    result.latency = last - start
    result.output_tokens = result.output_tokens or num_events  # a server without usage: one token per event


def _only_role(choice: _Choice) -> bool:
    return choice.delta is not None and choice.delta.role is not None and not choice.delta.content


def arrival_gaps(num: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds to wait before each request: gamma distributed with mean 1 / request_rate. Burstiness 1 is
    Poisson, less is burstier. All are 0 at rate inf.
    """
    if request_rate == float("inf"):
        return [0.0] * num
    rng = random.Random(seed)
    return [rng.gammavariate(burstiness, 1 / (request_rate * burstiness)) for _ in range(num)]


async def run_load(
    target: Target,
    samples: list[Sample],
    gaps: list[float],
    max_concurrency: int | None,
    done: Callable[[Result], None],
) -> tuple[list[Result], float]:
    """Send all samples. Returns (results in order of samples, seconds from the first request to the last response)."""
    gate = asyncio.Semaphore(max_concurrency or len(samples))

    async def one(sample: Sample) -> Result:
        async with gate:
            result = await send(target, sample)
        done(result)
        return result

    start = time.perf_counter()
    due = start
    tasks = []
    for sample, gap in zip(samples, gaps, strict=True):
        due += gap
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(sample)))
    results = await asyncio.gather(*tasks)
    return results, time.perf_counter() - start
