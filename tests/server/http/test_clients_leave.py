"""Deadlines, full queues, and clients that disconnect or read slowly."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from tests.helpers.server.asking import CHAT, is_error
from tests.helpers.server.running import poll
from tests.server.api.test_chat import HELLO
from tests.server.test_app import occupy


@pytest.mark.slow
def test_deadlines(slow_server):
    def ask(body: dict | None = None, **headers: str) -> dict:
        answer = slow_server.http.post(
            CHAT, json={"messages": HELLO, "max_tokens": 400, "ignore_eos": True} | (body or {}), headers=headers
        )
        assert answer.status_code == 200
        return answer.json()

    for reason, answer in (
        ("length", ask({"t_max_predict_ms": 150})),
        ("timeout", ask(**{"X-Request-Timeout": "0.3"})),
        ("timeout", ask({"timeout": 0.3}, **{"X-Request-Timeout": "100"})),
    ):
        choice = answer["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, "timeout")
        assert 0 < answer["usage"]["completion_tokens"] < 100
    poll(lambda: slow_server.state.client.num_open == 0)
    assert ask({"t_max_predict_ms": 0, "max_tokens": 2})["choices"][0]["stop_reason"] is None
    for bad in ("0", "-1", "soon", "inf", "nan", "1_0"):
        assert is_error(
            slow_server.http.post(CHAT, json={"messages": HELLO}, headers={"X-Request-Timeout": bad}),
            400,
            None,
            "X-Request-Timeout",
        )


@pytest.mark.slow
def test_a_full_queue_refuses(slow_server):
    streams = occupy(slow_server, 12)  # 4 run, 8 wait
    answer = slow_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
    assert (
        is_error(answer, 503, "overloaded")
        and int(answer.headers["retry-after"]) > 0
        and "limit is 8 (--max-num-queued-reqs)" in answer.json()["error"]["message"]
    )
    for stream in streams:
        stream.close()
    poll(lambda: slow_server.state.client.num_open == 0)
    assert slow_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_comments_keep_a_waiting_stream_alive(slow_server):
    streams = occupy(slow_server, 4)
    with slow_server.http.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 1, "stream": True}) as response:
        lines = response.iter_lines()
        assert (
            next(lines) == ": waiting for the first token"
            and next(lines) == ""
            and next(lines) == ": waiting for the first token"
        )
        for stream in streams:
            stream.close()
        assert [line for line in lines if line][-1] == "data: [DONE]"


# ---- clients that disconnect


def vanish(server, body: dict, after: float | None) -> None:
    """Send a request over a new socket and close it after some seconds or after the first bytes of the answer."""
    data = json.dumps({"messages": HELLO, "max_tokens": 450, "ignore_eos": True} | body).encode()
    with socket.create_connection(server.listener.getsockname()[:2]) as connection:
        connection.sendall(
            (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                b"%d\r\n\r\n"
            )
            % len(data)
            + data
        )
        if after is None:
            connection.recv(1)
        else:
            time.sleep(after)


@pytest.mark.parametrize(
    "body", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"stream": False, "n": 3}]
)
def test_a_client_that_goes_away_frees_its_request(slow_server, body):
    state = slow_server.state
    vanish(slow_server, body, 0.1)
    poll(lambda: state.client.num_open == 0 and state.num_in_flight == 0, timeout=2)
    poll(lambda: (state.stats.num_running, state.stats.num_waiting) == (0, 0), timeout=3)
    assert state.stats.kv_cache_usage == 0


@pytest.mark.slow
def test_five_hundred_clients_vanish_at_random_moments(slow_server):
    import random

    rng, state = random.Random(3), slow_server.state
    for _ in range(63):
        moments = [rng.choice([0, None, rng.random() * 0.05]) for _ in range(8)]
        bodies = [
            {
                "stream": True if moment is None else rng.random() < 0.5,
                "n": rng.choice([1, 2]),
                "max_tokens": rng.choice([1, 5, 450]),
            }
            for moment in moments
        ]
        threads = [
            threading.Thread(target=vanish, args=(slow_server, body, moment)) for body, moment in zip(bodies, moments)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    poll(lambda: state.client.num_open == 0 and state.num_in_flight == 0, timeout=5)
    poll(lambda: (state.stats.num_running, state.stats.num_waiting, state.stats.kv_cache_usage) == (0, 0, 0), timeout=5)
    assert slow_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 3}).status_code == 200


@pytest.mark.slow
def test_a_slow_reader_gets_fewer_larger_chunks(server):
    """The buffer of a slow client is bounded: pending outputs are merged, and the text is complete."""
    fields = {
        "messages": HELLO,
        "max_tokens": 400,
        "seed": 4,
        "ignore_eos": True,
        "n": 8,
        "logprobs": True,
        "top_logprobs": 20,
    }
    whole = server.http.post(CHAT, json=fields).json()
    texts = [""] * 8
    num_chunks = 0
    with server.http.stream("POST", CHAT, json=fields | {"stream": True}) as response:
        time.sleep(1.0)
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                texts[choice["index"]] += choice["delta"].get("content", "")
                num_chunks += 1
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert num_chunks < 8 * 400
