"""A full server: how many requests of a key may wait, and how long a refused one is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
import yaml

from quire.engine.messages import EngineStats
from quire.server.queue_wait import MAX_RETRY_AFTER, QueueWait, retry_after
from tests.helpers.server.running import poll, running_server

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "ignore_eos": True}
KEYS = [{"name": "many", "key": "k-many", "max_queued_requests": 3}, {"name": "other", "key": "k-other"}]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    """Two requests at a time, of 0.4 s each: 5 end in a second."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": KEYS}))
    settings = {"api_key_file": str(path), "max_num_seqs": 2, "max_num_queued_reqs": 20, "queue_timeout": 10.0}
    with running_server(model_folder, fake="step_delay=0.01", max_model_len="32768", **settings) as running:
        yield running.wait_ready()


@contextmanager
def both_places_taken(server, key: str) -> Iterator[None]:
    """Two choices run as long as this is open, so that no request of the same key leaves the queue, however slow the
    machine is. Another key could take one of the two places.
    """
    body = BODY | {"max_tokens": 30_000, "n": 2, "stream": True}
    with server.http.stream("POST", CHAT, json=body, headers=bearer(key)) as stream:
        lines, begun = stream.iter_lines(), set()
        while len(begun) < 2:
            if (line := next(lines)).startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                begun |= {choice["index"] for choice in choices if choice["delta"].get("content")}
        yield


class Asked:
    """`count` equal requests at once; `answers` has those that are there."""

    def __init__(self, server, count: int, key: str, **fields):
        self.answers: list = []
        ask = lambda: server.http.post(CHAT, json=BODY | fields, headers=bearer(key), timeout=60)  # noqa: E731
        self._threads = [threading.Thread(target=lambda: self.answers.append(ask())) for _ in range(count)]
        for one in self._threads:
            one.start()

    def wait(self) -> list:
        for one in self._threads:
            one.join()
        return self.answers

    def with_status(self, status: int) -> list:
        return [answer for answer in self.answers if answer.status_code == status]


def test_waiting_requests_of_a_key(server):
    with both_places_taken(server, "k-many"):
        assert Asked(server, 1, "k-many", max_tokens=1, timeout=0.2).wait()[0].status_code == 503  # its own time
        poll(lambda: server.state.num_waiting_of["many"] == 0)
        many = Asked(server, 3, "k-many", max_tokens=1)
        poll(lambda: server.state.num_waiting_of["many"] == 3)
        refused = Asked(server, 5, "k-many", max_tokens=1).wait()
    many.wait()
    assert [answer.status_code for answer in refused] == [429] * 5
    assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
    assert all(int(answer.headers["retry-after"]) > 0 and "max_queued_requests" in answer.text for answer in refused)
    poll(lambda: server.state.client.num_open == 0)
    poll(lambda: not any(server.state.num_waiting_of.values()))
    # an idle server has room, however many
    assert [answer.status_code for answer in Asked(server, 2, "k-many", max_tokens=1).wait()] == [200, 200]
    poll(lambda: not any(server.state.num_waiting_of.values()))


@pytest.mark.slow
def test_a_full_server_says_how_long_its_queue_takes(server):
    Asked(server, 6, "k-other").wait()  # the rate is measured with these
    estimate = lambda: retry_after(server.state.queue_wait.seconds(21))  # noqa: E731
    with server.openai_with("k-other") as client:  # made before, while the queue does not become shorter
        with both_places_taken(server, "k-other"):
            waiting = Asked(server, 20, "k-other")
            poll(lambda: server.state.client.load == 22)
            least = estimate()  # it grows while no request ends
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model="alias", messages=BODY["messages"])
            most = estimate()
            poll(lambda: waiting.with_status(503))  # after its time in the queue
        waiting.wait()
    assert caught.value.status_code == 503 and "seconds" in str(caught.value)
    # 21 would wait for 4.2 s; six requests on a busy machine measure a rate that is up to twice that
    assert 1 < least <= int(caught.value.response.headers["retry-after"]) <= most
    late = waiting.with_status(503)
    assert all(answer.json()["error"]["code"] == "queue_timeout" for answer in late)
    assert all(int(answer.headers["retry-after"]) > 0 for answer in late)
    poll(lambda: server.state.client.num_open == 0)


def test_the_estimate():
    wait = QueueWait()
    assert wait.seconds(0) == 0 and wait.seconds(5) < 1  # nothing is known yet
    wait.observe(0, EngineStats(num_running=1), 100.0)
    for i in range(1, 11):
        wait.observe(0, EngineStats(num_running=1, num_ended=2), 100.0 + i)
    assert wait.seconds(10) == pytest.approx(5)
    wait.observe(0, EngineStats(num_running=0), 111.0)
    before = wait.seconds(10)
    wait.observe(0, EngineStats(num_running=1), 5000.0)  # the time without requests does not count
    assert wait.seconds(10) == before
    for i in range(1, 301):  # slower ones: what was measured before fades
        wait.observe(0, EngineStats(num_running=1, num_ended=i % 10 == 0), 5000.0 + i)
    assert wait.seconds(10) == pytest.approx(100, rel=0.2)
    assert retry_after(0.2) == 1 and retry_after(4.1) == 5 and retry_after(1e9) == MAX_RETRY_AFTER


def test_two_engines_are_twice_as_fast():
    wait = QueueWait()
    for i in range(11):
        for engine in range(2):
            wait.observe(engine, EngineStats(num_running=1, num_ended=bool(i)), float(i))
    assert wait.seconds(10) == pytest.approx(5)
