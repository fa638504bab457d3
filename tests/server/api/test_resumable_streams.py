"""Streams that go on without their client: the rest can be read under the name that the client gave."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from quire.server.errors import BadRequest
from quire.server.http import resumable
from tests.helpers.server.running import poll, running_server

NAME = "a-stream-of-tests-0"
CHATS = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(model_folder):
    with running_server(model_folder, fake="step_delay=0.01", api_key=["one", "two"]) as running:
        yield running.wait_ready()


def headers(name: str | None = None, key: str = "one", **others: str) -> dict[str, str]:
    return {"x-api-key": key} | ({} if name is None else {resumable.HEADER: name}) | others


def events(text: str) -> list[tuple[int, str]]:
    """(number, data) of each event."""
    found = []
    for part in text.split("\n\n"):
        lines = [line for line in part.split("\n") if line and not line.startswith(":")]
        if lines:
            found.append((int(lines[0].removeprefix("id: ")), lines[1].removeprefix("data: ")))
    return found


def part_of(server, name: str, body: dict, path: str = CHATS, key: str = "one") -> list[tuple[int, str]]:
    """The first events of a stream; then the connection is closed."""
    with server.http.stream("POST", path, json=body, headers=headers(name, key)) as answer:
        assert answer.status_code == 200, answer.read()
        text = ""
        for piece in answer.iter_text():
            text += piece
            if text.count("\n\n") > 4:
                break
    return events(text[: text.rindex("\n\n") + 2])


def rest_of(server, name: str, after: int, key: str = "one") -> httpx.Response:
    given = headers(key=key) | {"Last-Event-ID": str(after)}
    return server.http.get(f"/v1/streams/{name}", headers=given)


def num_tokens(found: list[tuple[int, str]]) -> int:
    choices = [one for _, data in found if data != "[DONE]" for one in json.loads(data)["choices"]]
    return sum(len(one.get("token_ids") or ()) for one in choices)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_rest_follows_what_was_read(server, path):
    body = CHAT | {"max_tokens": 60, "return_token_ids": True} | ({} if "chat" in path else {"prompt": "Hello"})
    body = body if "chat" in path else {k: v for k, v in body.items() if k != "messages"}
    name = f"rest-{path.count('/')}-0123456789abc"
    first = part_of(server, name, body, path)
    rest = events(rest_of(server, name, first[-1][0]).text)
    both = first + rest
    assert rest and [number for number, _ in both] == list(range(1, len(both) + 1)) and both[-1][1] == "[DONE]"
    assert num_tokens(both) == 60
    assert events(rest_of(server, name, 0).text) == both  # after its end, too


def test_another_key_has_no_such_stream(server):
    part_of(server, NAME + "keys", CHAT | {"max_tokens": 30})
    assert rest_of(server, NAME + "keys", 0, key="two").status_code == 404
    assert server.http.delete(f"/v1/streams/{NAME}keys", headers=headers(key="two")).status_code == 204
    assert events(rest_of(server, NAME + "keys", 0).text)[-1][1] == "[DONE]"  # that has ended nothing
    assert rest_of(server, NAME + "nobody", 0).status_code == 404


def test_a_stopped_stream_ends_its_generation(server):
    first = part_of(server, NAME + "stop", CHAT | {"max_tokens": 400})
    assert server.state.client.load  # it goes on without its client
    assert server.http.delete(f"/v1/streams/{NAME}stop", headers=headers()).status_code == 204
    poll(lambda: not server.state.client.load and not server.state.num_in_flight)
    rest = events(rest_of(server, NAME + "stop", first[-1][0]).text)
    assert not rest or rest[-1][1] != "[DONE]"


def test_a_stream_without_readers_ends(server, monkeypatch):
    monkeypatch.setattr(resumable, "ABANDONED_AFTER", 0.2)
    part_of(server, NAME + "left", CHAT | {"max_tokens": 400})
    poll(lambda: not server.state.client.load and not server.state.num_in_flight)
    poll(lambda: rest_of(server, NAME + "left", 0).status_code == 404)


def test_a_client_has_its_share_of_streams(server, monkeypatch):
    """Those that have ended make room; beyond, a stream is as others are."""
    monkeypatch.setattr(resumable, "MAX_STREAMS_OF_ONE", 2)
    part_of(server, NAME + "many0", CHAT | {"max_tokens": 10}, key="two")
    poll(lambda: not server.state.client.load)
    for i in (1, 2):
        part_of(server, f"{NAME}many{i}", CHAT | {"max_tokens": 300}, key="two")
    assert rest_of(server, NAME + "many0", 0, key="two").status_code == 404
    body = CHAT | {"max_tokens": 3}
    with server.http.stream("POST", "/v1/chat/completions", json=body, headers=headers(NAME + "x", "two")) as answer:
        assert not any(line.startswith("id:") for line in answer.iter_lines())
    for i in (1, 2):
        server.http.delete(f"/v1/streams/{NAME}many{i}", headers=headers(key="two"))


@pytest.mark.parametrize(
    ("name", "body"),
    [("short", CHAT), ("a" * 65, CHAT), ("with space in its name", CHAT), (NAME + "whole", CHAT | {"stream": False})],
)
def test_a_name_that_cannot_be_used_is_refused(server, name, body):
    answer = server.http.post("/v1/chat/completions", json=body, headers=headers(name))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == resumable.HEADER


def test_a_number_that_is_none_is_refused(server):
    part_of(server, NAME + "number", CHAT | {"max_tokens": 5})
    given = headers() | {"Last-Event-ID": "x"}
    answer = server.http.get(f"/v1/streams/{NAME}number", headers=given)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "Last-Event-ID"


def test_the_events_kept_are_bounded_and_none_is_lost_without_a_reader():
    asyncio.run(_fill_and_follow())


async def _fill_and_follow() -> None:
    kept, taken = resumable.Kept("someone"), 0

    async def frames():
        nonlocal taken
        for number in range(1, 20_001):
            taken = number
            yield b"data: " + b"x" * 200 + b"\n\n"

    filling = kept.start(frames())
    for _ in range(1000):
        await asyncio.sleep(0)
    assert 0 < taken * 200 < 2 * resumable.MAX_BYTES and not filling.done()
    numbers = [int(line[4:]) async for part in kept.follow(0) for line in part.split(b"\n") if line.startswith(b"id: ")]
    assert numbers == list(range(1, 20_001)) and taken == 20_000 and kept.first > 15_000
    late = b"".join([part async for part in kept.follow(1)])
    assert b"events_gone" in late
    await filling


def test_a_name_is_used_once():
    asyncio.run(_use_twice())


async def _use_twice() -> None:
    streams = resumable.Streams()
    assert streams.add("me", NAME, "me") is not None and streams.add("you", NAME, "you") is not None
    with pytest.raises(BadRequest):
        streams.add("me", NAME, "me")
