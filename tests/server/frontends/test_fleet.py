"""Several frontend processes on one port."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.configs.options import all_options
from quire.server.frontends.channel import Channel
from quire.server.frontends.messages import FromFrontend, Page
from quire.server.frontends.parent import FrontendProcess, share
from tests.helpers.server.running import poll
from tests.server.api.test_chat import events
from tests.server.test_launch import (
    CHAT,
    SCRIPT,
    ServerProcess,
    gone,
    server_process,
)

pytestmark = pytest.mark.slow


def frontends(server: ServerProcess) -> list[psutil.Process]:
    """The frontend processes in order of their numbers, once these are known."""
    names = {}

    def is_frontend(child: psutil.Process) -> bool:
        names[child] = child.name()
        return names[child].startswith("quire-api-")

    return sorted(server.children(is_frontend), key=names.get)


def connections(server: ServerProcess, count: int = 2) -> list[httpx.Client]:
    """A connection to each frontend, identified by the process at its other end."""
    found: dict[int, httpx.Client] = {}
    end = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < end, "the kernel sends all connections to the same frontends"
        client = httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60.0, trust_env=False, verify=False)
        answer = client.send(client.build_request("GET", "/live"), stream=True)
        local = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        answer.read()
        owner = next(
            (
                process.pid
                for process in frontends(server)
                for one in process.net_connections("tcp")
                if one.raddr and one.raddr.port == local
            ),
            None,
        )
        if owner is not None and owner not in found:
            found[owner] = client
        else:
            client.close()
    return [found[process.pid] for process in frontends(server)]


@contextmanager
def fleet(folder: str, tmp_path: Path, count: int = 2, **settings) -> Iterator[ServerProcess]:
    with server_process(folder, tmp_path, api_server_count=count, **settings) as server:
        yield server


def wait_open(server: ServerProcess) -> ServerProcess:
    """Wait until every frontend serves."""
    poll(lambda: "ready in " in server.log or server.process.poll() is not None, 120)
    assert server.process.poll() is None, server.log
    return server


def body(number: int, num_tokens: int = 100) -> dict:
    return {
        "messages": [{"role": "user", "content": f"number {number}"}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": number,
        "n": 1 + number % 2,
    }


def crowd(
    server: ServerProcess, count: int, disturb: Callable[[], None] | None = None, num_tokens: int = 100
) -> list[list[str]]:
    """The texts of `count` requests at once, half of them streamed."""

    async def ask(http: httpx.AsyncClient, number: int) -> list[str]:
        if number % 4 < 2:
            answer = await http.post(CHAT, json=body(number, num_tokens), headers={"X-Request-Id": "the-same-for-all"})
            assert answer.status_code == 200, answer.text
            return [choice["message"]["content"] for choice in answer.json()["choices"]]
        texts = [""] * (1 + number % 2)
        async with http.stream("POST", CHAT, json=body(number, num_tokens) | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
        return texts

    async def main() -> list[list[str]]:
        limits = httpx.Limits(max_keepalive_connections=0)  # a connection for each request
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", timeout=60, trust_env=False, limits=limits
        ) as http:
            tasks = [asyncio.create_task(ask(http, number)) for number in range(count)]
            if disturb is not None:
                await asyncio.sleep(0.4)
                await asyncio.to_thread(disturb)
            return await asyncio.gather(*tasks)

    return asyncio.run(main())


def metric(page: str, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.mark.parametrize("num_engines", [1, 2])
def test_all_frontends_answer_and_an_engine_may_die(model_folder, tmp_path, num_engines):
    """The requests of every frontend continue, including those that share an id."""
    with fleet(model_folder, tmp_path, fake="step_delay=0.01", data_parallel_size=num_engines) as server:
        wait_open(server)
        assert [process.name() for process in frontends(server)] == ["quire-api-0", "quire-api-1"] and len(
            server.engines()
        ) == num_engines
        expected = crowd(server, 12)
        assert crowd(server, 12, server.engines()[0].kill) == expected
        assert server.log.count("open requests will be resubmitted") == 1
        for number in range(2):  # both frontends had requests
            assert f" server {number}: 127.0.0.1" in server.log
        assert connections(server)[0].get("/server_info").json()["config"]["server"]["api_server_count"] == 2


def test_probes_tell_the_truth_on_every_frontend(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, fake="load_delay=2") as server:
        wait_open(server)
        https = connections(server)
        assert all(http.get(path).status_code == 200 for http in https for path in ("/health", "/ready", "/live"))
        server.engines()[0].kill()
        killed = time.monotonic()
        for http in https:
            poll(lambda http=http: http.get("/health").status_code == 503, 1)
            assert http.get("/ready").status_code == 503 and http.get("/live").status_code == 200
        assert time.monotonic() - killed < 1
        for http in https:
            poll(lambda http=http: http.get("/health").status_code == 200)


def test_metrics_span_the_frontends(model_folder, tmp_path):
    """A scrape at any frontend shows the totals, including the counts of frontends that have ended."""
    with fleet(model_folder, tmp_path, data_parallel_size=2) as server:
        wait_open(server)
        https = connections(server)
        for http, count in zip(https, (2, 3), strict=True):
            for number in range(count):
                assert http.post(CHAT, json=body(2 * number, 7)).status_code == 200
        time.sleep(0.3)  # the engines' counts come four times a second
        pages = [http.get("/metrics").text for http in https]
        for page in pages:
            for prefix in ("vllm:", "quire:"):
                assert metric(page, prefix + "request_success_total", finished_reason="length") == 5
                assert metric(page, prefix + "generation_tokens_total") == 35
                assert metric(page, prefix + "time_to_first_token_seconds_count") == 5
            assert metric(page, "http_requests_total", handler=CHAT) == 5
            assert {
                sample.labels["engine"]
                for family in text_string_to_metric_families(page)
                for sample in family.samples
                if sample.name == "vllm:num_requests_running"
            } == {"0", "1"}
        frontends(server)[0].kill()
        poll(lambda: "frontend 0 died (signal SIGKILL)" in server.log)
        assert metric(https[1].get("/metrics").text, "vllm:request_success_total", finished_reason="length") == 5
        poll(lambda: len(frontends(server)) == 2)
        (new, _) = connections(server)
        poll(lambda: new.get("/ready").status_code == 200)
        assert new.post(CHAT, json=body(0, 7)).status_code == 200
        assert metric(https[1].get("/metrics").text, "vllm:request_success_total", finished_reason="length") == 6


def test_a_frontend_that_is_killed(model_folder, tmp_path):
    """Its connections are lost, the engine frees their requests; others continue; a new frontend replaces it."""
    with fleet(model_folder, tmp_path, fake="step_delay=0.02") as server:
        wait_open(server)
        # a streaming client sends no other request: that would need another connection
        (lost, kept), (_, asked) = connections(server), connections(server)
        victim = frontends(server)[0]
        whole = kept.post(CHAT, json=body(0, 80)).json()["choices"][0]["message"]["content"]
        streams = [
            http.send(http.build_request("POST", CHAT, json=body(0, 80) | {"stream": True}), stream=True)
            for http in (lost, kept)
        ]
        lines = [stream.iter_lines() for stream in streams]
        first = [next(line) for line in lines]
        victim.kill()
        poll(lambda: "disconnected: aborting its 1 requests" in server.log)
        with pytest.raises(httpx.HTTPError):
            list(lines[0])
        received = [first[1], *lines[1]]
        chunks = [json.loads(line[6:]) for line in received if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole
        poll(lambda: metric(asked.get("/metrics").text, "vllm:num_requests_running") == 0)
        poll(lambda: len(frontends(server)) == 2)
        assert victim.pid not in [process.pid for process in frontends(server)]
        for http in connections(server):
            poll(lambda http=http: http.get("/ready").status_code == 200)
            assert http.post(CHAT, json=body(0, 80)).json()["choices"][0]["message"]["content"] == whole
        assert len(server.engines()) == 1


QUICK_STALL = """
from quire.server.frontends import parent
parent.PING_INTERVAL, parent.STALL_TIMEOUT = 0.2, 2.0
"""


def test_a_frontend_that_stalls_is_replaced(model_folder, tmp_path):
    """Its successor takes over its share of the port; the requests of the other frontends continue."""
    with fleet(model_folder, tmp_path, fake="step_delay=0.02", script=QUICK_STALL + SCRIPT) as server:
        wait_open(server)
        (_, kept) = connections(server)
        stream = kept.send(kept.build_request("POST", CHAT, json=body(0, 250) | {"stream": True}), stream=True)
        victim = frontends(server)[0]
        time.sleep(2.5)  # an idle frontend that answers is not replaced
        assert victim.is_running()
        victim.suspend()
        poll(lambda: "frontend 0 died (it stalled: no answer for 2 seconds)" in server.log)
        stream.read()
        assert events(stream)[-2]["choices"][0]["finish_reason"] == "length"
        poll(lambda: len(frontends(server)) == 2 and victim.pid not in [process.pid for process in frontends(server)])
        for _ in range(20):
            assert httpx.get(f"http://127.0.0.1:{server.port}/live", timeout=5, trust_env=False).status_code == 200
        for http in connections(server):
            poll(lambda http=http: http.get("/health").status_code == 200)
        assert gone(victim)


def test_messages_to_a_stalled_frontend_do_not_pile_up():
    async def main() -> None:
        member = FrontendProcess(0, socket.socket(), 1)
        ours, theirs = socket.socketpair()
        with theirs, subprocess.Popen(["sleep", "100"]) as member.process:
            member.channel = await Channel.open(ours, FromFrontend)
            for _ in range(2000):
                member.send(Page(1, bytes(100_000)))
            assert member.channel.num_queued < 70 << 20 and "stalled" in member.stalled
            assert member.process.wait(5) == -signal.SIGKILL
            member.channel.close()

    asyncio.run(main())


def test_a_frontend_that_keeps_dying_ends_the_server(model_folder, tmp_path):
    with fleet(model_folder, tmp_path) as server:
        wait_open(server)
        for number in range(3):
            poll(lambda: len(frontends(server)) == 2)
            next(process for process in frontends(server) if process.name() == "quire-api-1").kill()
            poll(lambda number=number: server.log.count("frontend 1 died") > number)
        assert server.wait() == 1 and "frontend 1 died 3 times within 60 seconds" in server.log


def test_a_client_that_leaves(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, fake="step_delay=0.02") as server:
        wait_open(server)
        https = connections(server)
        for http in https:
            stream = http.send(http.build_request("POST", CHAT, json=body(0, 400) | {"stream": True}), stream=True)
            next(stream.iter_lines())
            stream.close()
        for http in https:
            poll(lambda http=http: metric(http.get("/metrics").text, "vllm:num_requests_running") == 0, 2)
        assert metric(https[0].get("/metrics").text, "vllm:request_success_total", finished_reason="abort") == 2


def test_the_queue_is_one(model_folder, tmp_path):
    """--max-num-queued-reqs counts the requests of all frontends, which exchange their counts with a delay of 0.1 s."""
    with fleet(model_folder, tmp_path, fake="step_delay=0.02", max_num_seqs=2, max_num_queued_reqs=2) as server:
        wait_open(server)
        first, second = connections(server)
        streams = []
        for _ in range(4):  # two run, two wait, all of them here
            client = connections(server)[0]
            streams.append(
                client.send(client.build_request("POST", CHAT, json=body(0, 400) | {"stream": True}), stream=True)
            )
        time.sleep(0.5)
        for http in (first, second):
            answer = http.post(CHAT, json=body(0, 1))
            assert answer.status_code == 503, answer.text
            assert "3 choices of requests would wait, and the limit is 2" in answer.text
        for stream in streams:
            stream.close()
        poll(lambda: second.post(CHAT, json=body(0, 1)).status_code == 200)


# ---- startup and shutdown


def test_requests_finish_after_a_signal(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, fake="step_delay=0.02") as server:
        wait_open(server)
        https, idle = connections(server), connections(server)
        streams = [
            http.send(http.build_request("POST", CHAT, json=body(0, 100) | {"stream": True}), stream=True)
            for http in https
        ]
        server.process.send_signal(signal.SIGTERM)
        for http in idle:
            poll(lambda http=http: http.get("/ready").status_code == 503, 1)
            answer = http.post(CHAT, json=body(0, 1))
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
        for stream in streams:
            stream.read()
            assert events(stream)[-2]["choices"][0]["finish_reason"] == "length"
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.wait() == 0 and all(gone(child) for child in children) and "Traceback" not in server.log


def test_what_does_not_finish_in_time_is_ended(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, fake="step_delay=0.05", shutdown_timeout=0.3) as server:
        wait_open(server)
        client = connections(server)[1]
        stream = client.send(client.build_request("POST", CHAT, json=body(0, 400) | {"stream": True}), stream=True)
        server.process.send_signal(signal.SIGINT)
        assert "the server is shutting down" in stream.read().decode()
        assert server.wait() == 0


def test_a_second_signal_ends_at_once(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, fake="step_delay=0.1", shutdown_timeout=30.0) as server:
        wait_open(server)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.stream()
        server.process.send_signal(signal.SIGINT)
        poll(lambda: server.status("/ready") == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.wait(3) == 128 + signal.SIGINT
        poll(lambda: all(gone(child) for child in children), 2)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


def test_a_killed_parent_leaves_nothing(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, fake="step_delay=0.05", data_parallel_size=2) as server:
        wait_open(server)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 4 and len(list(tmp_path.glob("quire-*"))) == 2
        server.stream()
        server.process.kill()
        poll(lambda: all(gone(child) for child in children), 2)
        assert not list(tmp_path.glob("quire-*"))
        # a process may appear ended while its last threads still close its sockets
        poll(lambda: is_free(server.port), 2)


def test_probes_answer_while_it_loads(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, fake="load_delay=4") as server:
        poll(lambda: server.status("/live") == 200, 20)
        poll(lambda: server.http.get("/ready").json().get("phase") == "loading weights")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_an_engine_that_keeps_dying_ends_the_server(model_folder, tmp_path):
    """Three times without a request; the first death, which a stream survives, does not count."""
    with fleet(model_folder, tmp_path, fake="step_delay=0.02") as server:
        wait_open(server)
        http, probe = (connections(server)[0] for _ in range(2))
        stream = http.send(http.build_request("POST", CHAT, json=body(0, 100) | {"stream": True}), stream=True)
        for number in range(4):
            poll(lambda number=number: server.log.count("the engine is ready again") == number)
            assert probe.post(CHAT, json=body(0, 1)).status_code == 200
            server.engines()[0].kill()
            if number == 0:
                assert stream.read().decode().endswith("data: [DONE]\n\n")
        assert server.wait() == 1 and "3 times within 60 seconds" in server.log


def test_what_the_user_can_correct(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, chat_template="{% if") as server:
        assert (
            server.wait(30) == 1
            and "cannot start: " in server.log
            and "chat template" in server.log
            and "Traceback" not in server.log
        )
    with pytest.raises(ValueError, match="--api-server-count: must be at least 1"):
        all_options()["api_server_count"].parse("0", "--api-server-count")


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_in_use(model_folder, tmp_path, count):
    """Also detects another fleet, although the kernel would allow sharing the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listeners = share(taken, 2)
        with fleet(model_folder, tmp_path, count, port=taken.getsockname()[1]) as server:
            assert server.wait(20) == 1 and "cannot listen on 127.0.0.1" in server.log and "in use" in server.log
        listeners[1].close()


def test_a_unix_socket_is_shared(model_folder, tmp_path):
    path = str(tmp_path / "s")
    with (
        fleet(model_folder, tmp_path, uds=path) as server,
        httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=20) as http,
    ):
        wait_open(server)
        assert http.post(CHAT, json=body(0, 3)).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and not Path(path).exists()


def test_one_frontend_is_in_the_server_process(model_folder, tmp_path):
    with fleet(model_folder, tmp_path, 1) as server:
        server.wait_ready()
        assert len(psutil.Process(server.process.pid).children(recursive=True)) == 1  # the engine
