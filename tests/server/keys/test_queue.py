"""A full server: how many requests of a key may wait, and how long a refused one is told to."""

from __future__ import annotations

import threading

import openai
import pytest
import yaml

from quire.engine.messages import EngineStats
from quire.server.queue_wait import MAX_RETRY_AFTER, QueueWait, retry_after
from tests.server.conftest import poll, running_server

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
    settings = {"api_key_file": str(path), "max_num_seqs": 2, "max_num_queued_reqs": 20, "queue_timeout": 3.0}
    with running_server(model_folder, fake="step_delay=0.01", **settings) as running:
        yield running.wait_ready()


def ask_at_once(server, count: int, key: str, **fields) -> list:
    answers = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(server.http.post(CHAT, json=BODY | fields, headers=bearer(key), timeout=60))
        )
        for _ in range(count)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return answers


def test_waiting_requests_of_a_key(server):
    busy = BODY | {"max_tokens": 450, "n": 2, "stream": True}
    with server.http.stream("POST", CHAT, json=busy, headers=bearer("k-other")) as stream:
        lines = stream.iter_lines()
        for index in (0, 1):  # both choices run
            while not ('"content":"' in (line := next(lines)) and f'"index":{index}' in line):
                pass
        answers = ask_at_once(server, 8, "k-many", max_tokens=1)
        assert ask_at_once(server, 1, "k-other", max_tokens=1, timeout=0.2)[0].status_code == 503  # its own time
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 5
    assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
    assert all(int(answer.headers["retry-after"]) > 0 and "max_queued_requests" in answer.text for answer in refused)
    poll(lambda: server.state.client.num_open == 0)
    poll(lambda: not any(server.state.num_waiting_of.values()))
    # an idle server has room, however many
    assert [answer.status_code for answer in ask_at_once(server, 2, "k-many", max_tokens=1)] == [200, 200]
    poll(lambda: not any(server.state.num_waiting_of.values()))


def test_a_full_server_says_how_long_its_queue_takes(server):
    ask_at_once(server, 6, "k-other")  # what the rate is measured with
    answers = []
    waiting = threading.Thread(target=lambda: answers.extend(ask_at_once(server, 22, "k-other")))
    with server.openai_with("k-other") as client:  # made before, while the queue does not become shorter
        waiting.start()
        try:
            poll(lambda: server.state.client.load == 22)
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model="alias", messages=BODY["messages"])
        finally:
            waiting.join()
    assert caught.value.status_code == 503 and "seconds" in str(caught.value)
    # 21 would wait for 4.2 s, on a machine that has time for them
    assert 3 <= int(caught.value.response.headers["retry-after"]) <= 40
    late = [answer for answer in answers if answer.status_code == 503]  # after 3 s in the queue
    assert late and all(answer.json()["error"]["code"] == "queue_timeout" for answer in late)
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
