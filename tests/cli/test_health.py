"""Tests `quire health`, as a command and as a container runs it, against servers on any port and on a socket."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import health
from quire.cli import main as cli
from tests.server.test_launch import ServerProcess, free_port

pytestmark = pytest.mark.slow

SCRIPT = Path(health.__file__)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("QUIRE_ADDRESS_FILE", "QUIRE_UDS", "QUIRE_HOST", "QUIRE_PORT"):
        monkeypatch.delenv(name, raising=False)


def check_of_a_container(**environment: object) -> subprocess.CompletedProcess:
    """Run the check as the Dockerfile does. The image's port differs from the server's."""
    variables = {
        "PATH": os.environ["PATH"],
        "QUIRE_PORT": "1",
        **{name: str(value) for name, value in environment.items()},
    }
    return subprocess.run(
        [sys.executable, "-I", "-S", SCRIPT], env=variables, capture_output=True, text=True, timeout=20, check=False
    )


def test_an_address_may_be_a_url():
    """As all other commands take it."""
    for url in ("127.0.0.1:81", "http://127.0.0.1:81", "http://127.0.0.1:81/v1/"):
        assert health.address_of(url) == "127.0.0.1:81"
    assert health.address_of("http://[::1]/v1") == "[::1]:80" and health.address_of("unix:/a/b") == "unix:/a/b"
    with pytest.raises(health.Unhealthy, match="expected http"):
        health.address_of("ftp://example.org")
    assert health.address_of("https://example.org/v1") == "https://example.org:443"
    variables = {"QUIRE_SSL_CERTFILE": "c", "QUIRE_PORT": "9"}
    assert health.find_address(variables) == "https://127.0.0.1:9"


@pytest.mark.parametrize("spelling", [["--url", "http://127.0.0.1:{}/v1"], ["--base-url", "127.0.0.1:{}"], ["{}"]])
def test_url_names_the_server(spelling, capsys):
    port = free_port()
    arguments = [one.format(port if "." in one else f"http://127.0.0.1:{port}") for one in spelling]
    assert cli.main(["health", *arguments]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["port", "uds", "wildcard"])
def test_it_follows_the_server(model_folder, tmp_path, where, monkeypatch):
    file = tmp_path / "address"
    settings = {"port": {}, "uds": {"uds": str(tmp_path / "socket")}, "wildcard": {"host": "0.0.0.0"}}[where]
    assert check_of_a_container(QUIRE_ADDRESS_FILE=file).returncode == 1
    server = ServerProcess(model_folder, tmp_path, address_file=str(file), **settings)
    try:
        while "ready in" not in server.log:
            assert server.process.poll() is None, server.log
        asked = check_of_a_container(QUIRE_ADDRESS_FILE=file)
        assert asked.returncode == 0 and '"ready"' in asked.stdout, asked.stderr
        monkeypatch.setenv("QUIRE_ADDRESS_FILE", str(file))
        assert cli.main(["health"]) == 0
        assert file.read_text() == (f"unix:{tmp_path}/socket" if where == "uds" else f"127.0.0.1:{server.port}")
        assert cli.main(["health", file.read_text()]) == 0
    finally:
        server.process.terminate()
        assert server.process.wait(20) == 0
    assert not file.exists() and cli.main(["health"]) == 1


def test_a_server_that_loads_is_not_healthy(model_folder, tmp_path, capsys):
    server = ServerProcess(model_folder, tmp_path, fake="load_delay=30", address_file=str(tmp_path / "address"))
    try:
        while not (tmp_path / "address").exists() or server.status("/live") != 200:
            assert server.process.poll() is None, server.log
        assert cli.main(["health", f"http://127.0.0.1:{server.port}/"]) == 1
        assert "HTTP 503" in (said := capsys.readouterr().err) and "loading" in said
    finally:
        server.process.terminate()
        server.process.wait(20)


def test_without_a_file_the_variables_of_the_server_count(monkeypatch):
    assert health.find_address({}) == "127.0.0.1:8000"
    assert health.find_address({"QUIRE_HOST": "0.0.0.0", "QUIRE_PORT": "9000"}) == "127.0.0.1:9000"
    assert health.find_address({"QUIRE_UDS": "/run/q"}) == "unix:/run/q"


def test_a_file_that_could_not_be_written_leaves_the_variables(tmp_path):
    """As in a container with a read-only file system. With a file, the variables do not count."""
    missing = {"QUIRE_ADDRESS_FILE": str(tmp_path / "address")}
    with pytest.raises(health.Unhealthy, match="no server has written its address"):
        health.find_address(missing)
    assert health.find_address(missing | {"QUIRE_HOST": "0.0.0.0", "QUIRE_PORT": "9000"}) == "127.0.0.1:9000"
    assert health.find_address(missing | {"QUIRE_UDS": "/run/q"}) == "unix:/run/q"
    (tmp_path / "address").write_text("127.0.0.1:7")
    assert health.find_address(missing | {"QUIRE_PORT": "9000"}) == "127.0.0.1:7"


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "unix:/no/such/socket", "nonsense"])
def test_no_server_is_one_line(address, capsys):
    assert cli.main(["health", address.format(port=free_port())]) == 1
    assert capsys.readouterr().err.startswith("not healthy: ")


def test_a_file_that_cannot_be_written_does_not_end_the_server(model_folder, tmp_path):
    server = ServerProcess(model_folder, tmp_path, address_file=str(tmp_path / "no" / "folder"))
    try:
        server.wait_ready()
        assert "--address-file: cannot write" in server.log
    finally:
        server.process.terminate()
        assert server.process.wait(20) == 0
