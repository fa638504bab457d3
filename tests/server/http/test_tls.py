"""HTTPS with certificates that openssl makes: renewed ones, and certificates of clients."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from quire.cli import main as cli
from quire.configs.config import ServerConfig
from quire.server.http.transport import tls
from quire.server.http.transport.connections import Limits
from tests.helpers.server.running import poll, running_server
from tests.server.http.test_connections import FEW_DESCRIPTORS
from tests.server.test_launch import server_process

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def certificate(folder: Path, name: str, serial: int) -> tuple[str, str]:
    """A certificate that signs itself, and its key."""
    paths = str(folder / f"{name}.crt"), str(folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-set_serial", str(serial), "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return paths


def serial_of(port: int) -> int:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as connection:
        der = connection.getpeercert(binary_form=True)
    text = subprocess.run(
        ["openssl", "x509", "-inform", "der", "-noout", "-serial"], input=der, capture_output=True, check=True
    ).stdout
    return int(text.decode().strip().partition("=")[2], 16)


@pytest.mark.slow
def test_https_and_a_renewed_certificate(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tls, "RELOAD_SECONDS", 0.1)
    cert, key = certificate(tmp_path, "server", 1)
    with running_server(model_folder, ssl_certfile=cert, ssl_keyfile=key) as server:
        server.wait_ready()
        port = server.listener.getsockname()[1]
        url = f"https://127.0.0.1:{port}"
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=cert), trust_env=False) as client:
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200
            with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as answer:
                assert list(answer.iter_lines())[-2] == "data: [DONE]"
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}/live", trust_env=False)
            assert cli.main(["health", url]) == 0 and '"ready"' in capsys.readouterr().out
            for address in (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/v1"):
                assert cli.main(["health", address, "--insecure"]) == 0  # by https, and it says so
                assert f"127.0.0.1:{port} has TLS: asked https://127.0.0.1:{port}" in capsys.readouterr().err
            assert serial_of(port) == 1
            Path(cert).write_text("half a file")
            certificate(tmp_path, "next", 2)
            assert serial_of(port) == 1
            shutil.move(tmp_path / "next.key", key)
            shutil.move(tmp_path / "next.crt", cert)
            poll(lambda: serial_of(port) == 2)
            assert client.get("/live").status_code == 200  # over the connection from before


@pytest.mark.slow
def test_commands_accept_any_certificate_if_they_are_told_to(model_folder, tmp_path, monkeypatch, capsys):
    cert, key = certificate(tmp_path, "server", 1)
    with running_server(model_folder, ssl_certfile=cert, ssl_keyfile=key) as server, open(os.devnull) as empty:
        server.wait_ready()
        monkeypatch.setattr("sys.stdin", empty)
        url = f"https://127.0.0.1:{server.listener.getsockname()[1]}"
        short = ["-q", "Hi", "--max-tokens", "2"]
        load = ["--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2", "--disable-tqdm"]
        commands = [["chat", *short], ["complete", *short], ["run", "--url", url, *short], ["bench", "serve", *load]]
        for command in commands:
            command += [] if "--url" in command else ["--url", url]
            code, _, errors = run(command, capsys)
            assert code == 1 and "--insecure accepts the certificate" in errors, errors
            code, text, errors = run([*command, "--insecure"], capsys)
            assert code == 0 and text.strip("\n"), errors
            code, _, errors = run([word.replace("https://", "http://") for word in command], capsys)
            assert code == 1 and "name it as https://127.0.0.1" in errors, errors


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return exit code, output and errors of `quire ARGUMENTS`."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code
    return code, *capsys.readouterr()


def unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def secured(port: int, data: bytes = b"") -> ssl.SSLSocket:
    connection = unchecked().wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10))
    connection.sendall(data)
    return connection


def read_all(connection: ssl.SSLSocket) -> bytes:
    """Read until the server closes the connection, with or without TLS's way to say so."""
    data = b""
    with suppress(ssl.SSLError, ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return data


@pytest.fixture(scope="module")
def secure(model_folder, tmp_path_factory):
    cert, key = certificate(tmp_path_factory.mktemp("tls"), "server", 1)
    with running_server(model_folder, ssl_certfile=cert, ssl_keyfile=key) as server:
        port = server.listener.getsockname()[1]
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=unchecked(), trust_env=False) as client:
            poll(lambda: client.get("/ready").status_code == 200, 60)
            yield server, port, client


REFUSED = {
    "too large": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 900000000\r\n\r\n{",
    "no HTTP": b"NOTHING\r\n\r\n",
    "two lengths": b"GET /live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_refused_connections_are_closed(secure, caplog, monkeypatch, name):
    """TLS has no half-closed connections."""
    server, port, client = secure
    connections = server.launcher.frontend.connections
    monkeypatch.setattr(connections, "limits", Limits(100, linger_timeout=0.2))
    with secured(port, REFUSED[name]) as connection:
        assert read_all(connection).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert client.get("/live").status_code == 200
    poll(lambda: len(connections.open) <= 1)  # the client's
    assert "Traceback" not in caplog.text and not [one for one in caplog.records if one.exc_info]


@pytest.mark.slow
def test_handshakes_have_a_deadline_and_are_counted(secure, monkeypatch):
    server, port, client = secure
    connections = server.launcher.frontend.connections
    monkeypatch.setattr(connections, "limits", Limits(100, header_timeout=1.0))
    for begin in (b"", b"\x16\x03\x01", b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
            poll(lambda: len(connections.open) == 2 and len(connections.idle) == 2)
            plain.sendall(begin)
            assert plain.recv(100) == b"" or begin == b"\x16\x03\x01"
        poll(lambda: len(connections.open) == 1)
    assert client.get("/live").status_code == 200


def test_a_request_in_the_same_packet_as_the_end_of_the_handshake(secure):
    """Its bytes arrive before the connection has its protocol."""
    _, port, _ = secure
    inbound, outbound = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls_client = unchecked().wrap_bio(inbound, outbound)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        while True:
            try:
                tls_client.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outbound.read())
                inbound.write(plain.recv(65536))
        tls_client.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        plain.sendall(outbound.read())  # the last message of the handshake, and the request
        answer = b""
        while b'"live"' not in answer:
            inbound.write(plain.recv(65536))
            with suppress(ssl.SSLWantReadError):
                while record := tls_client.read(65536):  # a packet may have several
                    answer += record
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="Linux only")
@pytest.mark.parametrize("kind", ["no handshake", "half a handshake", "idle", "refused"])
def test_more_connections_than_descriptors(model_folder, tmp_path, kind):
    """Of clients that answer nothing, not even that the connection may be closed."""
    cert, key = certificate(tmp_path, "server", 1)
    settings = {"ssl_certfile": cert, "ssl_keyfile": key}
    with server_process(model_folder, tmp_path, script=FEW_DESCRIPTORS, **settings) as server:
        url = f"https://127.0.0.1:{server.port}/health"

        def status() -> int | None:
            try:
                return httpx.get(url, timeout=5, verify=unchecked(), trust_env=False).status_code
            except httpx.HTTPError:
                return None

        poll(lambda: status() == 200, 60)
        held = []
        for _ in range(300):
            if kind in ("no handshake", "half a handshake"):
                held.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
                held[-1].sendall(b"\x16\x03\x01" if kind == "half a handshake" else b"")
            else:
                # at a moment without a descriptor, in the middle of a handshake
                with suppress(ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
                    held.append(secured(server.port, REFUSED["no HTTP"] if kind == "refused" else b""))
        assert len(held) > 250
        assert [status() for _ in range(5)] == [200] * 5
        for connection in held:
            connection.close()
        assert status() == 200 and len(server.log) < 100_000 and "Traceback" not in server.log
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.slow
def test_certificates_of_clients(model_folder, tmp_path):
    cert, key = certificate(tmp_path, "server", 1)
    own, own_key = certificate(tmp_path, "client", 2)
    settings = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": own, "ssl_cert_reqs": "required"}
    with running_server(model_folder, **settings) as server:
        server.wait_ready()
        url = f"https://127.0.0.1:{server.listener.getsockname()[1]}/live"
        context = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url, verify=context, trust_env=False)
        probe = ["health", url.removesuffix("/live")]
        assert cli.main(probe) == 1
        assert cli.main([*probe, "--cert", own, "--key", own_key]) == 0
        context.load_cert_chain(own, own_key)
        assert httpx.get(url, verify=context, trust_env=False).status_code == 200


@pytest.mark.slow
def test_files_that_cannot_be_used(tmp_path):
    cert, key = certificate(tmp_path, "server", 1)
    _, other = certificate(tmp_path, "other", 2)
    for config, what in (
        (ServerConfig(ssl_certfile=str(tmp_path / "none")), "--ssl-certfile .*: No such file"),
        (ServerConfig(ssl_certfile=cert, ssl_keyfile=other), "--ssl-certfile .*KEY_VALUES_MISMATCH"),
        (ServerConfig(ssl_keyfile=key), "--ssl-keyfile needs"),
        (ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_cert_reqs="required"), "needs --ssl-ca-certs"),
        (ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=key), "--ssl-ca-certs"),
    ):
        with pytest.raises(ValueError, match=what):
            tls.Tls(config)
