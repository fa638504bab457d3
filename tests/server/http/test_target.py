"""Request targets in absolute form (RFC 9112, 3.2.2): the same answers, permissions and checks as the path alone."""

from __future__ import annotations

import json
import shutil
import socket
import ssl

import pytest

from quire.server.http.transport.target import use_origin_form
from quire.server.routes import ROUTES
from tests.helpers.server.running import RunningServer, poll, running_server
from tests.server.api.test_chat import HELLO
from tests.server.http.test_tls import certificate

CHAT = "/v1/chat/completions"


def exchange(
    connection: socket.socket, method: str, target: str, body: bytes = b"", **fields: str
) -> tuple[int, bytes]:
    """(status, body) of one request with this target, byte for byte."""
    given = {"Host": "localhost", "Connection": "close", "Content-Type": "application/json"} | fields
    given["Content-Length"] = str(len(body))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    answer = b""
    with connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        while part := connection.recv(65536):
            answer += part
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), content


def ask(server: RunningServer, method: str, target: str, body: bytes = b"", **fields: str) -> tuple[int, bytes]:
    address = server.listener.getsockname()[:2]
    return exchange(socket.create_connection(address, timeout=30), method, target, body, **fields)


def chat() -> bytes:
    return json.dumps({"messages": HELLO, "max_tokens": 2, "temperature": 0, "seed": 1}).encode()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_answers_as_to_its_path(server, route):
    body = b"" if route.method in ("GET", "DELETE") else b"{}"
    path = route.path.replace("{model_id:path}", "x").replace("{", "").replace("}", "")
    status, _ = ask(server, route.method, path, body)
    assert ask(server, route.method, f"{server.url}{path}", body)[0] == status


def test_texts_of_both_forms(server):
    _, plain = ask(server, "POST", CHAT, chat())
    for target in (server.url + CHAT, f"HTTP://localhost{CHAT}", f"https://[::1]:8000{CHAT}"):
        status, absolute = ask(server, "POST", target, chat())
        assert status == 200 and json.loads(absolute)["choices"] == json.loads(plain)["choices"]
    assert ask(server, "GET", "http://localhost/v1/models?x=http://y/z")[0] == 200
    assert ask(server, "GET", "http://localhost") == ask(server, "GET", "/")
    assert ask(server, "GET", "http://localhost?x=1") == ask(server, "GET", "/?x=1")


@pytest.mark.parametrize("target", ["http:///v1/models", "http://user:pw@localhost/v1/models", "http://[::1/v1/models"])
def test_targets_without_a_host_are_refused(server, target):
    status, body = ask(server, "GET", target)
    assert status == 400 and "must name a host" in json.loads(body)["error"]["message"]
    status, body = ask(server, "GET", target.replace("http", "ftp"))
    assert status == 400 and "http://" in json.loads(body)["error"]["message"]


def test_the_authority_replaces_the_host(server):
    """A name that is not allowed is refused wherever it stands; a Host header next to an authority is ignored."""
    refused, body = ask(server, "GET", "http://evil.example/v1/models")
    assert refused == 403 and "evil.example" in json.loads(body)["error"]["message"]
    assert ask(server, "GET", "http://localhost/v1/models", Host="evil.example")[0] == 200
    scope = {"raw_path": b"http://a%2Fb/v1/x%2fy", "path": "", "headers": [(b"host", b"one"), (b"x", b"y")]}
    assert use_origin_form(scope) is None
    assert scope == {
        "raw_path": b"/v1/x%2fy",
        "path": "/v1/x/y",
        "headers": [(b"host", b"a%2Fb"), (b"x", b"y")],
    }


def test_permissions_are_those_of_the_path(model_folder):
    settings = {"api_key": ["client"], "admin_api_key": ["boss"], "root_path": "/proxy"}
    with running_server(model_folder, **settings) as server:
        server.wait_ready()
        for path in ("/v1/models", "/server_info", "/proxy/server_info", "/live", "/docs", CHAT):
            for key in ("", "client", "boss"):
                fields = {"Authorization": f"Bearer {key}"} if key else {}
                status, _ = ask(server, "GET", path, **fields)
                assert ask(server, "GET", f"http://127.0.0.1{path}", **fields)[0] == status, (path, key)


def test_unix_sockets(model_folder, tmp_path):
    with running_server(model_folder, uds=str(tmp_path / "socket")) as server:
        server.wait_ready()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(tmp_path / "socket"))
        assert exchange(connection, "POST", f"http://localhost{CHAT}", chat())[0] == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(model_folder, tmp_path):
    cert, key = certificate(tmp_path, "server", 1)
    with running_server(model_folder, ssl_certfile=cert, ssl_keyfile=key) as server:
        server.wait_ready()
        plain = socket.create_connection(server.listener.getsockname()[:2], timeout=30)
        secured = ssl.create_default_context(cafile=cert).wrap_socket(plain, server_hostname="127.0.0.1")
        assert exchange(secured, "POST", f"https://127.0.0.1{CHAT}", chat())[0] == 200


@pytest.mark.slow
def test_several_frontends(model_folder):
    with running_server(model_folder, api_server_count=2) as server:
        poll(lambda: {ask(server, "POST", f"http://localhost{CHAT}", chat())[0] for _ in range(8)} == {200}, 60)
