"""One engine over two machines: network namespaces with a cable between them, and real servers in them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.models.checkpoints import build_checkpoint, greedy, load_reference
from tests.helpers.server.running import poll

pytestmark = pytest.mark.slow
STEP_TIMEOUT = 30
LIMIT = 8 + STEP_TIMEOUT + 30  # seconds: silence, the wait for the machine, the restart on a loaded machine
BODY = {"prompt": [5, 6, 7, 8, 9] * 4, "max_tokens": 100, "temperature": 0, "ignore_eos": True}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Names of two namespaces; their ends of the cable are `c0` and `c1`, 10.87.0.1 and 10.87.0.2."""
    names = [f"q{os.getpid()}{i}" for i in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and ip: {error}")
    try:
        ip("link", "add", "c0", "netns", names[0], "type", "veth", "peer", "name", "c1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.87.0.{i + 1}/24", "dev", f"c{i}")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"c{i}", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


class Nodes:
    """The processes of both nodes. The first serves at a Unix socket, which needs no network."""

    def __init__(self, network: list[str], folder: str, place: Path, *flags: str):
        self.network, self.uds, self.log = network, str(place / "s"), place / "log"
        self.arguments = ["serve", folder, "--dtype", "float32", "--nnodes", "2", "--master-addr", "10.87.0.1", *flags]
        self.arguments += ["--step-timeout", str(STEP_TIMEOUT), "--max-model-len", "1024", "--uds", self.uds]
        self.processes = [self.start(0), self.start(1)]
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=self.uds), base_url="http://q", timeout=120.0)

    def start(self, node: int) -> subprocess.Popen:
        extra = ["--node-rank", "1", "--headless"] if node else []
        command = ["ip", "netns", "exec", self.network[node], sys.executable, "-m", "quire", *self.arguments, *extra]
        with self.log.open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            assert all(one.poll() is None for one in self.processes), self.log.read_text()[-3000:]
            return False

    def wait_ready(self) -> None:
        assert poll(self.is_ready, 180), self.log.read_text()[-3000:]

    def complete(self, token_ids: list[int] | None = None) -> str:
        answer = self.http.post("/v1/completions", json=BODY | {"return_token_ids": True})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert token_ids is None or choice["token_ids"] == token_ids
        return choice["text"]

    def stream(self, then) -> tuple[str, str | None]:
        """Call `then` after the first event of a stream. Returns its text, and its error if it ended with one."""
        text, error = "", None
        with self.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                error = event.get("error") or error
                text += "".join(choice["text"] for choice in event.get("choices", []))
                if then is not None:
                    then()
                    then = None
        return text, error

    def ranks(self, node: int) -> list[int]:
        """Return the process ids of the ranks of a node, by the namespace of their network."""
        found = subprocess.run(["ip", "netns", "pids", self.network[node]], check=True, capture_output=True, text=True)
        return [pid for pid in map(int, found.stdout.split()) if _name(pid).startswith("quire-worker")]

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in self.processes] == [0, 0]
        assert not [pid for node in (0, 1) for pid in self.ranks(node)]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_an_engine_over_two_machines(network, folder, tmp_path, flag):
    nodes = Nodes(network, folder, tmp_path, flag, "2")
    try:
        nodes.wait_ready()
        assert len(nodes.ranks(0)) == len(nodes.ranks(1)) == 1
        expected = nodes.complete(greedy(load_reference(folder), BODY["prompt"], BODY["max_tokens"])[0])

        # a rank of the other machine dies
        rank = nodes.ranks(1)[0]
        goes_on_or_fails(nodes, lambda: os.kill(rank, signal.SIGKILL), expected)
        if flag == "--tensor-parallel-size":  # the first stage of a pipeline waits for the second as these do
            self_heals(nodes, network, expected)
        nodes.stop()
    finally:
        print(nodes.log.read_text()[-6000:])  # shown if the test fails
        for process in nodes.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def goes_on_or_fails(nodes: Nodes, loss, expected: str) -> None:
    """The stream has its whole text, or a beginning and an error if the restart takes longer than --step-timeout. The
    engine is back in both cases.
    """
    text, error = nodes.stream(loss)
    assert text == expected if error is None else expected.startswith(text), (text, error)
    nodes.wait_ready()
    assert nodes.complete() == expected


def self_heals(nodes: Nodes, network: list[str], expected: str) -> None:
    # the other machine dies and comes back
    def replace() -> None:
        os.killpg(nodes.processes[1].pid, signal.SIGKILL)
        nodes.processes[1].wait(20)
        nodes.processes[1] = nodes.start(1)

    goes_on_or_fails(nodes, replace, expected)

    # the cable is cut: the stream ends with an error, and the engine is back with the cable
    began = time.monotonic()
    text, error = nodes.stream(lambda: ip("-n", network[1], "link", "set", "c1", "down"))
    assert error is not None and expected.startswith(text) and time.monotonic() - began < LIMIT, (text, error)
    ip("-n", network[1], "link", "set", "c1", "up")
    nodes.wait_ready()
    assert nodes.complete() == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nnodes 3 --tensor-parallel-size 2", "--nnodes 3 does not divide the number of ranks, 2"),
        ("--headless", "--headless needs --node-rank 1"),
        ("--nnodes 2 --node-rank 1 --tensor-parallel-size 2", "--node-rank 1 needs --headless"),
        ("--nnodes 2 --node-rank 2 --headless", "--node-rank 2 must be less than --nnodes 2"),
        ("--nnodes 2 --tensor-parallel-size 2 --data-parallel-size 2", "start a server on each"),
        ("--nnodes 2 --tensor-parallel-size 2 --distributed-executor-backend ray", "backend mp, not ray"),
    ],
)
def test_wrong_numbers_are_named(flags, message):
    from quire.configs.config import Config

    words = iter(flags.removeprefix("--").split(" --"))
    settings = {name.replace("-", "_"): value or True for name, _, value in (word.partition(" ") for word in words)}
    config = Config.from_flat(**{key: int(value) if str(value).isdigit() else value for key, value in settings.items()})
    with pytest.raises(ValueError, match=message):
        config.parallel.check_nodes(config.server.headless)
