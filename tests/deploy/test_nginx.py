"""deploy/nginx.conf with Debian's nginx: streams, long silences, connections that are kept, and servers restarted one
after the other under load, during ROLLING_REQUESTS requests (200).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.helpers.server.running import RunningServer, make_config, poll, running_server
from tests.server.test_launch import free_port

NGINX = shutil.which("nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
SITE = Path(__file__).parents[2] / "deploy/nginx.conf"
REQUESTS = int(os.environ.get("ROLLING_REQUESTS", "200"))
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}


def site(ports: list[int], port: int) -> str:
    """The site of deploy/, for servers and a client on this machine, without TLS."""
    text = SITE.read_text()
    servers = "".join(f"    server 127.0.0.1:{one} max_fails=0;\n" for one in ports)
    text, found = re.subn(r"    server 127\.0\.0\.1:8000.*\n    # server .*\n", servers, text)
    text, others = re.subn(r"    listen 443 ssl http2;\n", f"    listen 127.0.0.1:{port};\n", text)
    assert found == others == 1
    return re.sub(r"    ssl_certificate.*\n", "", text)


@contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[str]:
    """The URL of an nginx in front of servers."""
    port = free_port()
    (folder / "site.conf").write_text(site(ports, port))
    temporary = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log warn; worker_processes 1;\n"
        f"events {{ worker_connections 4096; }}\n"
        f"http {{ access_log off; {temporary} include {folder}/site.conf; }}\n"
    )
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        poll(lambda: process.poll() is not None or answers(url), 20)
        assert process.poll() is None, (folder / "error.log").read_text()
        yield url
    finally:
        process.terminate()
        process.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/live", trust_env=False).status_code < 500
    except httpx.TransportError:
        return False


HOST = {"host": "llm.example.org"}


@pytest.fixture(scope="module")
def proxied(model_folder, tmp_path_factory) -> Iterator[tuple[str, RunningServer]]:
    with running_server(model_folder, fake="step_delay=0.05", allowed_hosts=["llm.example.org"]) as server:
        server.wait_ready()
        with nginx(tmp_path_factory.mktemp("nginx"), [server.listener.getsockname()[1]]) as url:
            yield url, server


@pytest.mark.slow
def test_streams_are_not_buffered(proxied):
    url, _ = proxied
    times, body = [], BODY | {"max_tokens": 20, "stream": True}
    with httpx.stream("POST", url + CHAT, json=body, headers=HOST, timeout=30, trust_env=False) as answer:
        assert answer.status_code == 200
        times = [time.monotonic() for line in answer.iter_lines() if '"content":"' in line]
    # the engine takes 1 s; a buffer has all at once (some tokens have no text, and late ones come together)
    assert len(times) > 5 and times[-1] - times[0] > 0.5


def test_connections_to_the_server_are_kept_and_ids_passed_on(proxied):
    url, server = proxied
    with httpx.Client(base_url=url, headers=HOST, trust_env=False, timeout=30) as client:
        client.get("/v1/models")
        before = {one.client for one in server.launcher.frontend.connections.open}
        for _ in range(10):
            answer = client.get("/v1/models")
            assert answer.status_code == 200 and re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
        assert {one.client for one in server.launcher.frontend.connections.open} <= before


def test_errors_arrive_as_they_are(proxied):
    url, _ = proxied
    answer = httpx.post(url + CHAT, json={"messages": []}, headers=HOST, trust_env=False)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_a_long_request(proxied):
    url, _ = proxied
    answer = httpx.post(url + CHAT, json=BODY | {"max_tokens": 450}, headers=HOST, timeout=120, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == 450 and answer.elapsed.total_seconds() > 20


@pytest.mark.slow
def test_a_thousand_kept_connections(proxied):
    url, _ = proxied
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=url, headers=HOST, trust_env=False, timeout=60))]
        clients += [stack.enter_context(httpx.Client(**kept(url, clients[0]))) for _ in range(999)]
        for _ in range(2):
            with ThreadPoolExecutor(16) as pool:
                assert {answer.status_code for answer in pool.map(lambda one: one.get("/v1/models"), clients)} == {200}


def kept(url: str, first: httpx.Client) -> dict:
    """Arguments of another client, which need no certificates: loading those takes longer than the request."""
    return {"base_url": url, "headers": HOST, "trust_env": False, "timeout": 60, "verify": False}


def rolling(model_folder: str, folder: Path, num_requests: int, num_clients: int) -> list[int]:
    """The statuses of requests during which each of two servers ends and another one begins at its port."""
    settings = {"allowed_hosts": ["llm.example.org"], "shutdown_timeout": 20.0}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("FAKE_EXECUTOR", "step_delay=0.01")
        servers = [RunningServer(make_config(model_folder, **settings)).wait_ready() for _ in range(2)]
        stack.callback(lambda: [one.stop() for one in servers])
        ports = [one.listener.getsockname()[1] for one in servers]
        url = stack.enter_context(nginx(folder, ports))
        statuses, restarted = [], threading.Event()

        def restart() -> None:
            for i, port in enumerate(ports):
                servers[i].stop()
                servers[i].listener.close()
                servers[i] = RunningServer(make_config(model_folder, port=port, **settings)).wait_ready()
                time.sleep(0.3)
            restarted.set()

        def ask(number: int) -> None:
            body = BODY | {"max_tokens": 5 + number % 20, "stream": number % 2 == 0}
            with httpx.Client(headers=HOST, trust_env=False, timeout=60) as client:
                while len(statuses) < num_requests or not restarted.is_set():
                    answer = client.post(url + CHAT, json=body)
                    complete = "[DONE]" in answer.text if body["stream"] else "usage" in answer.text
                    statuses.append(answer.status_code if complete or answer.status_code != 200 else 0)

        restarting = threading.Thread(target=restart)
        with ThreadPoolExecutor(num_clients) as pool:
            running = [pool.submit(ask, number) for number in range(num_clients)]
            time.sleep(0.3)
            restarting.start()
            for one in running:
                one.result()
        restarting.join()
        return statuses


@pytest.mark.slow
def test_a_rolling_restart_loses_no_request(model_folder, tmp_path):
    statuses = rolling(model_folder, tmp_path, REQUESTS, 8)
    assert len(statuses) >= REQUESTS and set(statuses) == {200}
    print(f"{len(statuses)} requests, half of them streams, none failed")
