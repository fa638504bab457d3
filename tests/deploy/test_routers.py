"""Real routers in front of real servers: vLLM's and SGLang's, and Dynamo's indexer, where they are installed.

FLEET_PYTHON names the Python of an environment with vllm-router, sglang-router and ai-dynamo (of that without its
dependencies, with ai-dynamo-runtime); without it and without them in this one the tests are skipped.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.helpers.server.running import RunningServer, make_config, poll, running_server
from tests.server.test_launch import free_port

REQUESTS = int(os.environ.get("ROLLING_REQUESTS", "200"))
PYTHON = os.environ.get("FLEET_PYTHON", sys.executable)
ANSWERED = 'handler="/v1/completions",method="POST",status="2xx"'
TEXT = "A long enough prompt for some blocks. " * 12
BODY = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "seed": 1, "ignore_eos": True}
pytestmark = pytest.mark.slow


@functools.cache
def _has(module: str) -> bool:
    command = [PYTHON, "-c", f"import {module}"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def needs(module: str) -> None:
    if not _has(module):
        pytest.skip(f"{module} is not installed: FLEET_PYTHON names an environment with it")


@contextmanager
def program(*arguments: str, port: int, path: str = "/health") -> Iterator[httpx.Client]:
    """A client of a program of the other environment, once it answers."""
    process = subprocess.Popen([PYTHON, "-m", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False) as client:
        try:
            poll(lambda: process.poll() is not None or _answers(client, path), 60)
            assert process.poll() is None, "it ended at its start"
            yield client
        finally:
            process.terminate()
            process.wait(20)


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


FORMATS = pytest.mark.parametrize("event_format", ["map", "array"])


@FORMATS
def test_dynamos_indexer_knows_what_is_cached(model_folder, event_format):
    needs("dynamo.indexer")
    events, replay, port = free_port(), free_port(), free_port()
    config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    config["event_format"] = event_format
    with running_server(model_folder, block_size=16, kv_events_config=json.dumps(config)) as running:
        running.wait_ready()
        ids = running.http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
        asked = {"token_ids": ids, "model_name": "m"}
        running.http.post("/v1/completions", json=BODY)  # before the indexer listens: it asks for these again
        with program("dynamo.indexer", "--port", str(port), port=port) as indexer:
            worker = {"instance_id": 1, "model_name": "m", "block_size": 16}
            worker |= {"endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
            assert indexer.post("/register", json=worker).is_success

            def score() -> int:
                running.http.post("/v1/completions", json=BODY | {"prompt": str(time.monotonic()) + TEXT})
                return indexer.post("/query", json=asked).json()["scores"].get("1", {}).get("0", 0)

            assert poll(score, 30) == len(ids) // 16 * 16
            running.http.post("/reset_prefix_cache", headers={"X-Requested-With": "test"})
            poll(lambda: not indexer.post("/query", json=asked).json()["scores"].get("1", {}).get("0", 0), 30)


def test_vllms_router_sends_prompts_to_the_server_that_has_cached_them(model_folder):
    """vllm-router 0.1.17 reads maps only: without events it chooses a server at random."""
    needs("vllm_router")
    port = free_port()
    with ExitStack() as stack:
        pair, sources = [], []
        for _ in range(2):
            events = free_port()
            config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}"}
            settings = {"block_size": 16, "kv_events_config": json.dumps(config)}
            pair.append(stack.enter_context(running_server(model_folder, **settings)).wait_ready())
            sources += ["--kv-event-source", f"{pair[-1].url}=tcp://127.0.0.1:{events}"]
        arguments = ["vllm_router.launch_router", "--policy", "kv_aware", "--kv-event-model", "m", *sources]
        arguments += ["--worker-urls", *(one.url for one in pair), "--host", "127.0.0.1", "--port", str(port)]
        router = stack.enter_context(program(*arguments, "--prometheus-port", str(free_port()), port=port))
        name = pair[0].config.server.served_model_name[0]

        def follows() -> bool:  # events before the router listens are lost
            body = BODY | {"prompt": str(time.monotonic()) + TEXT, "model": name}
            pair[1].http.post("/v1/completions", json=body)
            before = answered(pair[1])
            time.sleep(0.2)  # for the event
            assert router.post("/v1/completions", json=body).is_success
            return answered(pair[1]) == before + 1

        poll(follows, 60)
        assert all(follows() for _ in range(8))


def answered(server: RunningServer) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if ANSWERED in line)


def test_vllms_router_sends_prompts_to_one_server_and_decodes_at_another(model_folder, server):
    needs("vllm_router")
    port = free_port()
    with ExitStack() as stack:
        pair = []
        for role in ("kv_producer", "kv_consumer"):
            config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": free_port()}
            running = running_server(model_folder, block_size=16, kv_transfer_config=json.dumps(config))
            pair.append(stack.enter_context(running))
        prefill, decode = (one.wait_ready() for one in pair)
        arguments = ["vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        arguments += ["--prefill", prefill.url, "--decode", decode.url, "--host", "127.0.0.1", "--port", str(port)]
        router = stack.enter_context(program(*arguments, port=port))
        answer = router.post("/v1/completions", json=BODY | {"model": server.config.server.served_model_name[0]})
        assert answer.status_code == 200, answer.text
        alone = server.http.post("/v1/completions", json=BODY).json()
        assert answer.json()["choices"][0]["text"] == alone["choices"][0]["text"]
        metrics = decode.http.get("/metrics").text
        hits = [line for line in metrics.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")]
        assert sum(float(line.rpartition(" ")[2]) for line in hits) >= 16


def test_vllms_router_chooses_the_engine(model_folder):
    """In turn; the server would send all of these prompts to one engine."""
    needs("vllm_router")
    port = free_port()
    with running_server(model_folder, data_parallel_size=2) as server:
        server.wait_ready()
        arguments = ["vllm_router.launch_router", "--policy", "round_robin", "--worker-urls", server.url]
        arguments += [
            "--intra-node-data-parallel-size",
            "2",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--prometheus-port",
            str(free_port()),
        ]
        with program(*arguments, port=port) as router:
            body = BODY | {"model": server.config.server.served_model_name[0]}
            poll(lambda: router.post("/v1/completions", json=body).is_success, 30)
            for _ in range(5):
                assert router.post("/v1/completions", json=body).is_success
        lines = server.http.get("/metrics").text.splitlines()
        done = [line for line in lines if line.startswith("vllm:request_success_total") and 'reason="length"' in line]
        assert [float(line.rpartition(" ")[2]) for line in done] == [3, 3]


@pytest.mark.parametrize("package", ["vllm_router", "sglang_router"])
def test_servers_restart_one_after_the_other_behind_a_router(model_folder, monkeypatch, package):
    """Of ROLLING_REQUESTS requests and more, a quarter of them streams, none fails while both servers restart."""
    needs(package)
    monkeypatch.setenv("FAKE_EXECUTOR", "step_delay=0.01")
    port, ports = free_port(), [free_port(), free_port()]
    name = "org/test-model"

    def start(one: int) -> RunningServer:
        return RunningServer(make_config(model_folder, port=one, shutdown_timeout=20.0)).wait_ready()

    servers = [start(one) for one in ports]
    arguments = [f"{package}.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    arguments += ["--worker-urls", *(f"http://127.0.0.1:{one}" for one in ports)]
    arguments += ["--prometheus-port", str(free_port())]
    arguments += ["--health-check-interval-secs", "1", "--retry-max-retries", "8", "--cb-timeout-duration-secs", "2"]
    failed: list[str] = []
    done, restarted = 0, threading.Event()

    def ask(router: httpx.Client, i: int) -> None:
        nonlocal done
        body = {"model": name, "prompt": f"request {i}", "max_tokens": 8, "ignore_eos": True, "stream": i % 4 == 0}
        try:
            answer = router.post("/v1/completions", json=body)
            if answer.status_code != 200 or (body["stream"] and "[DONE]" not in answer.text):
                failed.append(f"{i}: {answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            failed.append(f"{i}: {error!r}")
        done += 1

    def restart() -> None:
        for i, one in enumerate(ports):
            poll(lambda i=i: done > REQUESTS * (1 + 2 * i) // 7, 300)
            assert servers[i].stop() == 0
            servers[i] = start(one)
            poll(lambda i=i: ANSWERED in servers[i].http.get("/metrics").text, 120)  # the router sends to it again
        restarted.set()

    def numbers() -> Iterator[int]:
        for i in range(50_000):
            if i >= REQUESTS and restarted.is_set():
                return
            yield i

    with program(*arguments, port=port) as router, ThreadPoolExecutor(8) as pool:
        worker = threading.Thread(target=restart)
        worker.start()
        made = numbers()
        while chunk := list(itertools.islice(made, 100)):
            list(pool.map(functools.partial(ask, router), chunk))
        worker.join()
    for one in servers:
        one.stop()
    assert restarted.is_set() and not failed, failed[:5]
    print(f"{done} requests, a quarter of them streams, none failed")
