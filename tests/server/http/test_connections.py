"""HTTP below the routes: the number of connections, the time a request may take to arrive, and answers to malformed
HTTP."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil
import pytest

from quire.server.frontends.descriptors import complain_once_about_descriptors
from quire.server.http.transport.connections import Limits
from tests.helpers.server.running import RunningServer, poll, running_server
from tests.server.api.test_chat import HELLO
from tests.server.test_launch import CHAT, SCRIPT, gone, server_process

FEW_DESCRIPTORS = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n" + SCRIPT
QUICK = {"header_timeout": 0.5, "body_timeout": 0.5, "linger_timeout": 1.0}


@pytest.fixture(scope="module")
def own_server(model_folder) -> Iterator[RunningServer]:
    with running_server(model_folder, fake="step_delay=0.01") as running:
        yield running.wait_ready()


@pytest.mark.slow
def test_idle_connections_outlive_those_of_balancers(own_server, model_folder):
    """Balancers keep theirs for 60 to 600 s; one that is reused while the server closes it is a reset."""
    assert own_server.config.server.timeout_keep_alive > 600
    for path in ("/live", "/v1/models", "/nothing"):
        assert own_server.http.get(path).headers["keep-alive"] == "timeout=620"
    assert "keep-alive" not in own_server.http.get("/live", headers={"connection": "close"}).headers
    with running_server(model_folder, timeout_keep_alive=1.5) as server:
        server.wait_ready()
        with connect(port_of(server)) as connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            began = time.monotonic()
            answer = read_all(connection)  # to the end of the connection
            assert b"keep-alive: timeout=1\r\n" in answer and 1 < time.monotonic() - began < 5


def test_methods_that_http_does_not_define(own_server, caplog):
    """They are labels of metrics and parts of log lines: clients must not make up any number of them, nor long ones."""
    caplog.set_level("INFO", logger="quire.access")
    for i, method in enumerate((*(f"MADE-UP-{i}" for i in range(20)), "get", "X" * 60_000)):
        path = "/v1/models" if i % 2 else "/nothing"
        with connect(port_of(own_server)) as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405 " if i % 2 else b"HTTP/1.1 404 ") and len(body) < 1000, method[:20]
    text = own_server.http.get("/metrics").text
    found = re.findall(r'^http_requests_total\{.*method="([^"]*)"', text, re.MULTILINE)
    assert "other" in found and set(found) <= {"GET", "HEAD", "POST", "DELETE", "other"}
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    assert own_server.http.request("PATCH", "/v1/models").status_code == 405


def test_clients_that_vanish_are_noticed(own_server):
    """Their system answers no probe; without probes a request that waits is kept for hours."""
    with connect(port_of(own_server)) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.recv(1000)
        (found,) = [
            one.transport.get_extra_info("socket")
            for one in own_server.launcher.frontend.connections.open
            if one.client[1] == connection.getsockname()[1]
        ]
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silence, interval, count = (
            found.getsockopt(socket.IPPROTO_TCP, one)
            for one in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert silence + interval * count <= 60


@contextmanager
def limits(server: RunningServer, **values) -> Iterator[None]:
    """Set limits for connections that are opened in the meantime."""
    connections = server.launcher.frontend.connections
    before, connections.limits = connections.limits, Limits(**{"max_connections": 1000} | values)
    try:
        yield
    finally:
        connections.limits = before


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def port_of(server: RunningServer) -> int:
    return server.listener.getsockname()[1]


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def post(body: bytes, **headers: str) -> bytes:
    fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value), "", ""]
    return "\r\n".join(lines).encode()


def error_of(answer: bytes, status: int) -> dict:
    """The error object of an answer, which must be the only one and must announce the end of the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower() and b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- malformed HTTP


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /live HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_malformed_requests_get_json(own_server, request_bytes):
    with connect(port_of(own_server)) as connection:
        connection.sendall(request_bytes)
        error = error_of(read_all(connection), 400)
    assert error["type"] == "invalid_request_error" and "not valid HTTP" in error["message"]


def test_headers_that_are_too_long(own_server):
    with connect(port_of(own_server)) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000)
        assert error_of(read_all(connection), 431)["type"] == "invalid_request_error"


def test_a_broken_chunk_in_a_body(own_server):
    with connect(port_of(own_server)) as connection:
        connection.sendall(post(b"", Content_Length="", Transfer_Encoding="chunked") + b"5\r\nabcde\r\nnot a size\r\n")
        assert "not valid HTTP" in error_of(read_all(connection), 400)["message"]


def test_two_lengths_are_refused(own_server):
    """One proxy may use the first length, the next the second."""
    body = b'{"messages": []}'
    with connect(port_of(own_server)) as connection:
        chunks = b"%x\r\n%s\r\n0\r\n\r\nGET /live HTTP/1.1\r\nHost: x\r\n\r\n" % (len(body), body)
        connection.sendall(post(body, Transfer_Encoding="chunked") + chunks)
        assert "both Content-Length and Transfer-Encoding" in error_of(read_all(connection), 400)["message"]


# ---- answers before the body has been read


@pytest.mark.parametrize("declared", [True, False])
def test_after_a_413_the_connection_is_closed(own_server, declared):
    """The connection closes after the client had time to read: the client sends more than the sockets buffer first."""
    size = 80 << 20
    with connect(port_of(own_server)) as connection, limits(own_server, linger_timeout=10.0):
        if declared:
            connection.sendall(post(b"", Content_Length=str(size)))
        else:
            connection.sendall(post(b"", Content_Length="", Transfer_Encoding="chunked") + b"%x\r\n" % size)
        for _ in range(size >> 20):
            connection.sendall(b" " * (1 << 20))
        assert "larger than" in error_of(read_all(connection), 413)["message"]
    assert own_server.http.get("/live").status_code == 200


@pytest.mark.slow
def test_a_client_that_goes_on_sending_is_cut_off(own_server):
    with limits(own_server, linger_timeout=0.5):
        with connect(port_of(own_server)) as connection:
            connection.sendall(post(b"", Content_Length=str(1 << 40)))
            started = time.monotonic()
            with pytest.raises(OSError):
                while time.monotonic() - started < 10:
                    connection.sendall(b" " * 1000)
                    time.sleep(0.01)
        assert time.monotonic() - started < 5


# ---- deadlines


@pytest.mark.slow
def test_slow_headers(own_server):
    with limits(own_server, **QUICK):
        silent, partial, later = (connect(port_of(own_server)) for _ in range(3))
        partial.sendall(b"GET /live HTTP/1.1\r\nHost:")
        later.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while b'"live"}' not in answer:
            answer += later.recv(65536)
        later.sendall(b"GET /live HT")
        for byte in b"TP/1.1\r\nHo":  # a few bytes at a time are no progress
            time.sleep(0.1)
            with suppress(OSError):
                later.sendall(bytes([byte]))
        assert read_all(silent) == b""
        assert "headers did not arrive within 0.5 seconds" in error_of(read_all(partial), 408)["message"]
        assert "headers did not arrive" in error_of(read_all(later), 408)["message"]
        for connection in (silent, partial, later):
            connection.close()


@pytest.mark.slow
def test_a_body_that_makes_no_progress(own_server):
    with limits(own_server, **QUICK), connect(port_of(own_server)) as connection:
        connection.sendall(post(b"", Content_Length="100000") + b"{" * 5000)
        assert "no progress for 0.5 seconds" in error_of(read_all(connection), 408)["message"]
    poll(lambda: own_server.state.num_in_flight == 0)
    assert own_server.launcher.frontend.connections.body_bytes == 0


@pytest.mark.slow
def test_a_slow_body_that_progresses_is_accepted(own_server):
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "user": "x" * 20_000}).encode()
    with limits(own_server, **QUICK), connect(port_of(own_server)) as connection:
        connection.sendall(post(body))
        for start in range(0, len(body), 3000):
            connection.sendall(body[start : start + 3000])
            time.sleep(0.2)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_long_answer_has_no_deadline(own_server):
    with limits(own_server, **QUICK):
        body = {"messages": HELLO, "max_tokens": 150, "ignore_eos": True}
        answer = httpx.post(own_server.url + CHAT, json=body, trust_env=False)
    assert answer.status_code == 200 and answer.elapsed.total_seconds() > 1


@pytest.mark.slow
def test_a_request_timeout_counts_from_the_arrival(own_server):
    body = json.dumps({"messages": HELLO, "max_tokens": 400, "ignore_eos": True}).encode()
    with connect(port_of(own_server)) as connection:
        connection.sendall(post(body, X_Request_Timeout="0.7", Connection="close"))
        time.sleep(1.0)
        connection.sendall(body)
        head, _, answer = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and json.loads(answer)["error"]["code"] == "timeout"


# ---- memory


def test_the_bodies_in_flight_have_a_budget(own_server):
    with limits(own_server, body_budget=200_000):
        big = connect(port_of(own_server))
        big.sendall(post(b"", Content_Length="1000000") + b" " * 300_000)  # a single body may be larger
        poll(lambda: own_server.launcher.frontend.connections.body_bytes > 200_000)
        with connect(port_of(own_server)) as connection:
            connection.sendall(post(b"{" * 10_000) + b"{" * 10_000)
            answer = read_all(connection)
        assert error_of(answer, 503)["code"] == "overloaded" and b"Retry-After: 2" in answer
        big.close()
        poll(lambda: own_server.launcher.frontend.connections.body_bytes == 0)
        assert own_server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_a_body_leaves_the_budget_when_it_was_parsed(own_server):
    """The budget is released before the answer ends."""
    connections = own_server.launcher.frontend.connections
    body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True, "user": "u" * 100_000}
    with own_server.http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()  # a generator that is not kept closes the connection
        next(lines)
        assert connections.body_bytes == 0 and own_server.state.num_in_flight == 1


# ---- descriptors


@pytest.mark.slow
def test_the_soft_limit_is_raised(model_folder, tmp_path):
    lower = "from resource import *\nsetrlimit(RLIMIT_NOFILE, (300, getrlimit(RLIMIT_NOFILE)[1]))\n"
    with server_process(model_folder, tmp_path, script=lower + SCRIPT) as server:
        server.wait_ready()
        soft, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert soft == min(hard, 1 << 20) > 300


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="Linux only")
@pytest.mark.parametrize("begin", [b"", b"GET /v1/models HTTP/1.1\r\nHost:"], ids=["idle", "slowloris"])
def test_more_idle_connections_than_descriptors(model_folder, tmp_path, begin):
    """Health responds, the log stays small, and an engine that dies meanwhile is replaced."""
    with server_process(model_folder, tmp_path, fake="step_delay=0.01", script=FEW_DESCRIPTORS) as server:
        server.wait_ready()
        stream = server.stream(num_tokens=300)
        idle = []
        for _ in range(300):
            idle.append(connect(server.port))
            idle[-1].sendall(begin)
        for _ in range(5):
            assert httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=5, trust_env=False).status_code == 200
        engine = server.engine()
        engine.kill()
        poll(lambda: gone(engine) and "is ready again" in server.log, 20)
        for connection in idle:  # and all at once
            connection.close()
        assert "[DONE]" in stream.read().decode(), "a connection with a request is not closed"
        assert server.status("/health") == 200 and len(server.log) < 20_000 and "Traceback" not in server.log
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_connections_that_cannot_be_accepted_are_reported_once(caplog):
    loop = asyncio.new_event_loop()
    complain_once_about_descriptors(loop)
    with socket.socket() as listener:
        for _ in range(2000):
            context = {"message": "accept failed", "exception": OSError(errno.EMFILE, "Too many"), "socket": listener}
            loop.call_exception_handler(context)
    loop.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"cannot accept connections: [Errno {errno.EMFILE}] Too many"]


@pytest.mark.slow
def test_all_connections_answering(own_server):
    """Only probes are accepted in addition."""
    with limits(own_server, max_connections=3):
        streams = [httpx.Client(trust_env=False, base_url=own_server.url, timeout=20) for _ in range(3)]
        body = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "stream": True}
        answers = [http.send(http.build_request("POST", CHAT, json=body), stream=True) for http in streams]
        while len(own_server.launcher.frontend.connections.idle):  # left by earlier tests
            own_server.launcher.frontend.connections.close_longest_idle()
        assert httpx.get(own_server.url + "/health", trust_env=False).status_code == 200
        refused = httpx.post(own_server.url + CHAT, json=body, trust_env=False)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) > 0
        for answer in answers:
            assert re.search(r"data: \[DONE\]", answer.read().decode())
        assert httpx.post(own_server.url + CHAT, json=body | {"max_tokens": 1}, trust_env=False).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc_trim")
def test_the_memory_of_large_bodies_is_given_back(model_folder, tmp_path):
    with server_process(model_folder, tmp_path) as server:
        server.wait_ready()
        process = psutil.Process(server.process.pid)
        assert server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
        before = process.memory_info().rss
        for _ in range(3):
            server.http.post("/detokenize", json={"tokens": [5] * 2_000_000})
        poll(lambda: process.memory_info().rss - before < 40 << 20, 20)
