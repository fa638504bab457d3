"""Tests that work that grows with a request does not block the event loop, and that the queue is bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.server.http.sse import ClientGone, unless_disconnected
from quire.server.text.chat_template import ChatTemplate
from quire.server.turns.threads import LARGE, PER_TURN, SMALL, Threads
from tests.helpers.server.hostile_bodies import AUDIT, BOUNDS, KINDS, Row, post
from tests.helpers.server.running import MODEL, poll, running_server
from tests.server.api.test_chat import HELLO
from tests.server.test_app import CHAT, is_error, occupy

LIMIT = 0.010  # seconds of CPU time of one piece of work on the loop; 5 ms on an idle machine
ATTEMPTS = 5
# Reading and writing it takes about LIMIT on an idle machine, and longer where others use the same cores and caches.
REFERENCE = json.dumps({"messages": [{"role": "user", "content": f"word {i}"} for i in range(15_000)]})


@pytest.fixture(scope="module")
def bounded_server(model_folder):
    with running_server(
        model_folder, max_model_len="2048", trust_request_chat_template=False, max_num_seqs=128
    ) as server:
        yield server.wait_ready()


def limit_now() -> float:
    """`LIMIT`, or CPU seconds of the reference's work if they are more: the better of two runs, as a garbage collection
    may fall into one.
    """
    seconds = []
    for _ in range(2):
        started = time.thread_time()
        json.dumps(json.loads(REFERENCE))
        seconds.append(time.thread_time() - started)
    return max(LIMIT, min(seconds))


@pytest.fixture
def pieces(bounded_server, monkeypatch) -> list[tuple[float, str]]:
    """CPU seconds of every callback of the server's loop, independent of other processes on the machine."""
    run, measured = asyncio.Handle._run, []

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        if handle._loop is bounded_server.loop:
            measured.append((time.thread_time() - started, repr(handle)))

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    gc.collect()
    gc.freeze()  # the objects of all tests before make a collection long
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("row", AUDIT + BOUNDS + KINDS, ids=lambda row: row.name)
def test_no_body_holds_up_the_loop(bounded_server, pieces, row: Row):
    """Every row of the audits' tables, and every parameter at its bound."""
    body = row.make()
    bounded_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
    for _ in range(ATTEMPTS):  # a garbage collection, slow because of the tests' own objects, may fall into a callback
        pieces.clear()
        status = post(bounded_server.url + row.path, body)
        assert status in (0, 200, 400, 413, 503)
        poll(lambda: bounded_server.state.num_in_flight == 0)
        longest = max(pieces)
        if longest[0] < limit_now():
            return
    pytest.fail(f"the loop was held for {1000 * longest[0]:.1f} ms of CPU time by {longest[1][:500]}")


# ---- threads


def test_small_work_stays_and_long_work_goes():
    async def main() -> None:
        threads, here = Threads(), threading.current_thread().name
        name = lambda: threading.current_thread().name  # noqa: E731
        assert await threads.run(SMALL - 1, name, "a") == here
        assert (await threads.run(SMALL, name, "a")).startswith("work")
        assert (await threads.run(LARGE, name, "a")).startswith("large-work")
        await asyncio.sleep(0)
        # one loop iteration if no other work waits
        many = [await threads.run(SMALL - 1, name, "a") for _ in range(2 * PER_TURN // SMALL)]
        assert many[0] == here and any(one.startswith("work") for one in many)

    asyncio.run(main())


def test_large_work_does_not_delay_other_work():
    async def main() -> None:
        threads, gate = Threads(), threading.Event()
        large = [asyncio.create_task(threads.run(LARGE, gate.wait, "a")) for _ in range(4)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(threads.run(SMALL, lambda: "soon", "a"), 5) == "soon"
        gate.set()
        await asyncio.gather(*large)

    asyncio.run(main())


def test_work_of_a_client_that_left_is_dropped():
    class Request:
        async def receive(self) -> dict:
            return {"type": "http.disconnect"}

    async def main() -> None:
        threads, gate, done = Threads(), threading.Event(), []
        busy = [asyncio.create_task(threads.run(LARGE, gate.wait, "a")) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(ClientGone):
            await unless_disconnected(Request(), threads.run(LARGE, lambda: done.append(1), "a"))
        gate.set()
        await asyncio.gather(*busy)
        await threads.run(LARGE, lambda: None, "a")
        assert not done

    asyncio.run(main())


@pytest.mark.slow
def test_a_strangers_template_does_not_stop_the_loop(model_folder):
    with running_server(model_folder, trust_request_chat_template=True) as server, ThreadPoolExecutor(4) as pool:
        server.wait_ready()
        template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        body = {"messages": HELLO, "max_tokens": 1, "chat_template": template}
        hostile = [pool.submit(server.http.post, CHAT, json=body) for _ in range(3)]
        slowest = 0.0
        while not all(one.done() for one in hostile):
            started = time.monotonic()
            assert server.http.get("/live").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < 2
        assert all(is_error(one.result(), 400, None, "messages") for one in hostile)


RENDERING = {
    CHAT: {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "go"}]},
    "/apply-template": {"messages": [{"role": "user", "content": "go"}]},
    "/tokenize": {"messages": [{"role": "user", "content": "go"}]},
    "/v1/responses": {"input": "go", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "go"},
    "/v1/messages": {"model": "alias", "messages": [{"role": "user", "content": "go"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "alias", "messages": [{"role": "user", "content": "go"}]},
    "/api/chat": {"model": "alias", "messages": [{"role": "user", "content": "go"}], "stream": False},
    "/api/generate": {"model": "alias", "prompt": "go", "stream": False, "options": {"num_predict": 1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", RENDERING)
def test_the_models_own_template_does_not_stop_the_loop(bounded_server, monkeypatch, path):
    """A small body, which would be read on the loop if it were not for the template."""
    where: set[str] = set()
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda *a, **k: where.add(threading.current_thread().name) or render(*a, **k)
    )
    answer = bounded_server.http.post(path, json=RENDERING[path])
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses":  # a history needs another turn
        where.clear()
        following = RENDERING[path] | {"previous_response_id": answer.json()["id"]}
        assert bounded_server.http.post(path, json=following).status_code == 200
    assert where and all(name.startswith(("work", "large-work")) for name in where)


# ---- the queue


@pytest.mark.slow
def test_a_full_queue_counts_choices(slow_server):
    streams = occupy(slow_server, 6)  # 4 run, 2 wait
    assert slow_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "n": 7}).status_code == 503
    for stream in streams:
        stream.close()
    poll(lambda: slow_server.state.num_reserved == slow_server.state.client.num_waiting_tokens == 0)
    # too many even on an idle server
    answer = slow_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "n": 13})
    assert (
        is_error(answer, 400, None, "messages")
        and "limit is 8 (--max-num-queued-reqs)" in answer.json()["error"]["message"]
    )
    assert slow_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "n": 12}).status_code == 200


@pytest.mark.slow
def test_a_full_queue_counts_tokens(model_folder):
    with running_server(model_folder, fake="step_delay=0.01", max_num_seqs=2, max_num_queued_tokens=1000) as server:
        server.wait_ready()
        streams = occupy(server, 2)
        long = {"prompt": [5] * 400, "max_tokens": 1}
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(server.http.post, "/v1/completions", json=long) for _ in range(2)]
            poll(lambda: server.state.client.num_open == 4)
            answers = [server.http.post("/v1/completions", json=long | {"n": 2})]
            for stream in streams:
                stream.close()
            assert [one.result().status_code for one in waiting] == [200, 200]
        assert (
            is_error(answers[0], 503, "overloaded")
            and "--max-num-queued-tokens" in answers[0].json()["error"]["message"]
        )
        poll(lambda: server.state.num_reserved == 0)
        assert is_error(server.http.post("/v1/completions", json=long | {"n": 8}), 400, None, "prompt")
        assert server.http.post("/v1/completions", json=long).status_code == 200
        assert server.state.client.num_waiting_tokens == 0


@pytest.mark.slow
def test_queues_are_bounded_by_default_and_0_takes_the_bound_away(model_folder):
    from quire.configs.config import ServerConfig

    assert ServerConfig().max_num_queued_reqs == 4096 and ServerConfig().max_num_queued_tokens == 2**22
    with running_server(model_folder, max_num_seqs=2, max_num_queued_reqs=0, max_num_queued_tokens=0) as server:
        server.wait_ready()
        assert (
            server.http.post("/v1/completions", json={"prompt": [[5]] * 50, "n": 100, "max_tokens": 1}).status_code
            == 200
        )


@pytest.mark.slow
def test_the_limit_of_bodies_grows_with_the_context_and_can_be_set(model_folder):
    with running_server(model_folder, max_body_size=5000) as server:
        server.wait_ready()
        answer = server.http.post(CHAT, content=b" " * 5001, headers={"content-type": "application/json"})
        assert (
            is_error(answer, 413)
            and "5000" in answer.json()["error"]["message"]
            and "--max-body-size" in answer.json()["error"]["message"]
        )
        assert (
            server.http.post(
                CHAT,
                content=json.dumps({"messages": HELLO, "max_tokens": 1}).encode().ljust(5000),
                headers={"content-type": "application/json"},
            ).status_code
            == 200
        )


# ---- tenants


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True])
def test_tenants_do_not_see_each_others_prefixes(model_folder, share):
    message = [{"role": "user", "content": "a prompt that fills a few blocks of the cache " * 4}]
    with running_server(model_folder, api_key=["one", "two"], share_prefix_cache=share) as server:
        server.wait_ready()

        def cached(key: str, **fields: str) -> int:
            with server.openai_with(key) as client:
                return client.chat.completions.create(
                    model=MODEL, messages=message, max_tokens=1, extra_body=fields
                ).usage.prompt_tokens_details.cached_tokens

        assert cached("one") == 0 and cached("one") > 0
        assert (cached("two") > 0) == share
        assert cached("two") > 0
        assert cached("one", cache_salt="s") == 0 and cached("one", cache_salt="s") > 0
        assert (cached("two", cache_salt="s") > 0) == share


@pytest.mark.slow
def test_hosts_that_were_named_are_answered(model_folder):
    with running_server(model_folder, allowed_hosts=["api.example"]) as server:
        server.wait_ready()
        assert [
            server.http.get("/version", headers={"host": host}).status_code
            for host in ("api.example", "API.example:80", "evil.example")
        ] == [200, 200, 403]
    with running_server(model_folder, allowed_hosts=["*"]) as server:
        server.wait_ready()
        assert server.http.get("/version", headers={"host": "evil.example"}).status_code == 200
