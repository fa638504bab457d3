"""Compressed bodies, and the addresses of clients behind proxies."""

from __future__ import annotations

import gzip
import json

import pytest

from quire.configs.proxies import read_proxies
from quire.server.errors import BadRequest
from quire.server.http.bodies.gzip_body import decompress
from quire.server.routes import ROUTES
from tests.helpers.server.running import poll, running_server

JSON = {"content-type": "application/json", "content-encoding": "gzip"}
COMPLETION = {"prompt": "hi", "max_tokens": 1}


def send(server, path: str, content: bytes):
    return server.http.post(path, content=content, headers=JSON)


def test_gzip(server):
    body = {"messages": [{"role": "user", "content": "word " * 100}], "max_tokens": 2}
    plain = server.http.post("/v1/chat/completions", json=body).json()
    packed = send(server, "/v1/chat/completions", gzip.compress(json.dumps(body).encode())).json()
    assert packed["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    classify = gzip.compress(json.dumps({"input": "hi"}).encode())
    assert "gzip" not in send(server, "/classify", classify).text  # a route that reads the body twice


POSTS = {route.path for route in ROUTES if isinstance(route.body, type) and route.method == "POST"}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(POSTS))
def test_a_bomb_is_too_large(server, path):
    """Two megabytes of zeros are two kilobytes."""
    path = path.replace("{conversation_id}", "conv_1")
    assert send(server, path, gzip.compress(b"[" + b" " * (4 << 20))).status_code == 413
    for broken in (b"{}", gzip.compress(b"{}")[:-3], b""):
        assert send(server, path, broken).status_code == 400


def test_members():
    assert decompress(gzip.compress(b"ab") + gzip.compress(b"c"), 3) == b"abc"
    assert decompress(gzip.compress(b"ab") + gzip.compress(b"c"), 2) is None
    with pytest.raises(BadRequest, match="16 members"):
        decompress(gzip.compress(b"") * 17, 10)


def test_bodies_that_are_decompressed_count_for_the_memory_of_all(model_folder):
    with running_server(model_folder) as server:
        connections = server.wait_ready().launcher.frontend.connections
        connections.body_bytes = connections.limits.body_budget  # others'
        packed = gzip.compress(json.dumps(COMPLETION | {"user": "x" * 10**6}).encode())
        answer = send(server, "/v1/completions", packed)
        assert answer.status_code == 503 and answer.headers["retry-after"]


def client_of(server, caplog) -> str:
    """Of a request with a header, as the log has it."""
    caplog.clear()
    server.http.get("/v1/models", headers={"x-forwarded-for": "203.0.113.7, 198.51.100.2"})
    line = poll(lambda: next((record.message for record in caplog.records if record.name == "quire.access"), None))
    return line.partition(" ")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trusted", "seen"),
    [(None, "198.51.100.2:"), ("192.0.2.1", "127.0.0.1:"), ("127.0.0.0/8,198.51.100.2", "203.0.113.7:")],
)
def test_headers_of_proxies(model_folder, caplog, trusted, seen):
    caplog.set_level("INFO", "quire.access")
    with running_server(model_folder, forwarded_allow_ips=trusted) as server:
        server.wait_ready()
        assert client_of(server, caplog).startswith(seen)


def test_addresses_that_are_none():
    assert read_proxies("127.0.0.1, 10.0.0.0/8,::1") and read_proxies("*")
    for wrong in ("proxy", "*,::1", "", "10.0.0.1/8"):
        with pytest.raises(ValueError, match="no address"):
            read_proxies(wrong)
