"""Bodies from the OpenAPI document, at and beyond every bound, sent to a real server next to innocent streams.

No stream is changed, lost, or much slower.

Before a release: HOSTILE_BODIES=2000 python -m pytest tests/end_to_end/test_hostile_bodies.py -m slow
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from quire.cli.bench.process import ServerProcess, free_port
from quire.server.api.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.server.request.limits import MAX_PROMPTS
from tests.helpers.server.hostile_bodies import CHAT, crowd, memory
from tests.helpers.server.running import poll

pytestmark = pytest.mark.slow

PATHS = {
    "ChatCompletionRequest": CHAT,
    "CompletionRequest": "/v1/completions",
    "TokenizeRequest": "/tokenize",
    "DetokenizeRequest": "/detokenize",
}
STREAMS, TOKENS = 4, 64
NUMBER = int(os.environ.get("HOSTILE_BODIES", "80"))
# characters or ids of prompts, times n: these bodies do not test the amount of computation, which the scheduler limits
MAX_COMPUTED = 20_000
LONGEST = 70_000  # maximum elements or characters of a drawn value
MAX_BYTES = 3 * 2**20  # approximate bytes of a drawn list or mapping; more than the server reads
# in addition to the initial size; the warmer of an idle server alone takes 0.9 GiB of KV cache
ENGINE_MIB, SERVER_MIB = 1500, 700


# ---- strategies from a schema


def values(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy:
    """Values that `schema` allows, at its bounds and around them."""
    if "$ref" in schema:
        return objects(components[schema["$ref"].rpartition("/")[2]], components)
    if "anyOf" in schema:
        return st.one_of([values(one, components) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], "other"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            return numbers(schema)
        case "string":
            return texts(schema)
        case "array":
            return lists(schema, components)
        case "object" if "properties" in schema:
            return objects(schema, components)
        case "object":
            return mappings(schema, components)
    return st.recursive(
        st.none() | st.integers(-5, 5) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    )


def numbers(schema: dict[str, Any]) -> st.SearchStrategy:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1)), schema.get("maximum", 2**63)
    edges = [low, low - 1, low + 1, high, high - 1, high + 1, 0, 1, 511, 2047, 2048, 10**20]
    within = (
        st.integers(int(max(low, -1000)), int(min(high, 1000)))
        if schema["type"] == "integer"
        else st.floats(float(max(low, -1e6)), float(min(high, 1e6)))
    )
    return within | within | st.sampled_from(edges)


def around(limit: int) -> st.SearchStrategy:
    """Lengths, mostly short."""
    limit = min(limit, LONGEST)
    return st.one_of(
        st.integers(0, 4), st.integers(0, 4), st.sampled_from([limit - 1, limit, limit + 1]), st.integers(0, limit)
    )


def texts(schema: dict[str, Any]) -> st.SearchStrategy:
    units = st.sampled_from(
        ["a", " ", "word ", "é", "\U0001f98a", "\u200d", "\\", '"', "<|im_end|>", "\n", "{{ x }}", "0", "7"]
    ) | st.text(min_size=1, max_size=3)
    return st.builds(
        lambda unit, count: (unit * (count // len(unit) + 1))[:count], units, around(schema.get("maxLength", 50))
    )


def num_bytes(value: Any) -> int:
    """Approximate size of `value` as JSON."""
    if isinstance(value, dict):
        return 2 + sum(4 + len(name) + num_bytes(item) for name, item in value.items())
    if isinstance(value, list):
        return 2 + sum(1 + num_bytes(item) for item in value)
    return 2 + len(value) if isinstance(value, str) else 4


def lists(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy:
    """A few different elements, repeated up to the length."""
    some = st.lists(values(schema["items"], components), min_size=1, max_size=3)

    def repeat(items: list[Any], count: int) -> list[Any]:
        count = min(count, MAX_BYTES * len(items) // num_bytes(items))
        return (items * (count // len(items) + 1))[:count]

    return st.builds(repeat, some, around(schema.get("maxItems", 50)))


def mappings(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy:
    inner = schema.get("additionalProperties")
    names = st.sampled_from(["{}", "5", "-{}", "self", "x{}", "messages", ""])
    some = values(inner if isinstance(inner, dict) else {}, components)

    def repeat(name: str, value: Any, count: int) -> dict[str, Any]:
        count = min(count, MAX_BYTES // num_bytes({name: value}))
        return {name.format(i): value for i in range(count)}

    return st.builds(repeat, names, some, around(schema.get("maxProperties", 50)))


def objects(schema: dict[str, Any], components: dict[str, Any]) -> st.SearchStrategy:
    """Required fields, and up to four of the others; occasionally an unknown one."""
    fields = {name: values(one, components) for name, one in schema["properties"].items()}
    required = schema.get("required", [])

    @st.composite
    def draw_object(draw) -> dict[str, Any]:
        some = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True) if fields else st.just([])
        names = draw(some)
        body = {name: draw(fields[name]) for name in dict.fromkeys([*required, *names])}
        return body | {draw(st.text(max_size=300)): 1} if draw(st.integers(0, 20)) == 0 else body

    return draw_object()


def bodies() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    types = [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
    _, components = msgspec.json.schema_components(types)
    return st.sampled_from(types).flatmap(
        lambda cls: st.tuples(st.just(cls.__name__), objects(components[cls.__name__], components))
    )


# ---- the server and the innocent streams


class Innocents:
    """Streams that repeat while `running`; each must equal its reference text."""

    def __init__(self, url: str):
        self.url, self.times, self.errors, self.running = url, [], [], True
        self.references = asyncio.run(self._round())

    async def _round(self) -> list[str]:
        async with httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False) as client:
            streams, _ = await crowd(client, STREAMS, TOKENS)
            self.times += [stream.duration for stream in streams]
            return [stream.text for stream in streams]

    def run(self) -> None:
        while self.running:
            try:
                texts = asyncio.run(self._round())
                if texts != self.references:
                    self.errors.append(f"texts changed: {texts}")
            except Exception as error:
                self.errors.append(repr(error))

    def median(self, seconds: float | None = None, work: Any = None) -> float:
        """Median time of the streams while `work` runs, or for some seconds."""
        self.times, self.running = [], True
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            time.sleep(seconds) if work is None else work()
        finally:
            self.running = False
            thread.join()
        assert not self.errors, self.errors[:3]
        return statistics.median(self.times)


@pytest.fixture(scope="module")
def url() -> Iterator[tuple[str, psutil.Process]]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        "--port",
        str(port),
        "--deterministic",
        "--num-threads",
        "1",
        "--log-level",
        "error",
    ]
    with ServerProcess(command, port) as server:
        address = f"http://127.0.0.1:{port}"
        poll(lambda: server.process.poll() is not None or _is_up(address), 180)
        assert server.process.poll() is None, "the server has ended"
        yield address, psutil.Process(server.process.pid)
        server.log.seek(0)
        assert not re.search(rb"Traceback.*", server.log.read()), "the server's log has a traceback"


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _calm(fields: dict[str, Any]) -> dict[str, Any]:
    """Limit the number of tokens, and the number of prompts if it is within the bounds."""
    fields = {name: value for name, value in fields.items() if name not in ("min_tokens", "max_completion_tokens")} | {
        "max_tokens": 2
    }
    prompt = fields.get("prompt", "")
    size = sum(len(one) if isinstance(one, (str, list)) else 1 for one in prompt)
    if isinstance(prompt, list) and len(prompt) <= MAX_PROMPTS and size > MAX_COMPUTED:
        fields["prompt"] = prompt[: max(1, len(prompt) * MAX_COMPUTED // size)]
    if isinstance(fields.get("n"), int) and 8 < fields["n"] <= 128:
        fields["n"] = 8
    return fields


def send_generated(url: str, number: int) -> list[str]:
    """Send generated bodies; return the errors in the answers."""
    wrong: list[str] = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:

        @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(bodies())
        def send(drawn: tuple[str, dict[str, Any]]) -> None:
            name, fields = drawn
            path = PATHS[name]
            if path.startswith("/v1"):
                fields = _calm(fields)
            try:
                answer = client.post(
                    path, content=msgspec.json.encode(fields), headers={"content-type": "application/json"}
                )
            except httpx.TransportError as error:
                if len(msgspec.json.encode(fields)) < 2**21:  # a larger body may be refused before it was read
                    wrong.append(f"{path} {error!r} {str(fields)[:300]}")
                return
            event(str(answer.status_code))
            if (
                answer.status_code not in (200, 400, 404, 413, 503)
                or "internal_error" in answer.text
                or "engine_error" in answer.text
            ):
                wrong.append(f"{path} {answer.status_code} {answer.text[:300]} {str(fields)[:300]}")

        send()
    return wrong


def check(url: tuple[str, psutil.Process], number: int, threads: int) -> None:
    address, process = url
    innocents = Innocents(address)
    before = memory(process)
    alone = innocents.median(seconds=3.0)
    wrong: list[str] = []

    def hostile() -> None:
        with ThreadPoolExecutor(threads) as pool:
            for found in pool.map(lambda _: send_generated(address, number // threads), range(threads)):
                wrong.extend(found)

    beside = innocents.median(work=hostile)
    assert not wrong, wrong[:5]
    after = memory(process)
    print(f"{number} bodies: a stream took {alone:.2f} s alone and {beside:.2f} s beside them; MiB {before} -> {after}")
    assert beside < 3 * alone + 1.0, f"a stream took {beside:.2f} s beside the hostile bodies and {alone:.2f} s alone"
    assert after[0] - before[0] < SERVER_MIB and after[1] - before[1] < ENGINE_MIB, (before, after)


def test_generated_bodies_hurt_nobody(url):
    check(url, NUMBER, 2)
