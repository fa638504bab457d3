"""HTTPS with certificates that openssl makes: renewed ones, and certificates of clients."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from quire.cli import main as cli
from quire.configs.config import ServerConfig
from quire.server.http import tls
from tests.helpers.server.running import poll, running_server

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
def test_commands_accept_any_certificate_if_they_are_told_to(model_folder, tmp_path):
    cert, key = certificate(tmp_path, "server", 1)
    with running_server(model_folder, ssl_certfile=cert, ssl_keyfile=key) as server:
        server.wait_ready()
        url = f"https://127.0.0.1:{server.listener.getsockname()[1]}"
        short = ["-q", "Hi", "--max-tokens", "2"]
        load = ["--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2", "--disable-tqdm"]
        commands = [["chat", *short], ["complete", *short], ["run", "--url", url, *short], ["bench", "serve", *load]]
        for command in commands:
            command += [] if "--url" in command else ["--url", url]
            refused = run([*command])
            assert refused.returncode == 1 and "--insecure accepts the certificate" in refused.stderr, refused
            accepted = run([*command, "--insecure"])
            assert accepted.returncode == 0 and accepted.stdout.strip(), accepted
            plain = run([word.replace("https://", "http://") for word in command])
            assert plain.returncode == 1 and "name it as https://127.0.0.1" in plain.stderr, plain
            assert "Traceback" not in refused.stderr + plain.stderr


def run(arguments: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


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
