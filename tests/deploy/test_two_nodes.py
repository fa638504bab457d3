"""One engine over two machines: network namespaces with a cable between them, and real servers in them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.models.checkpoints import build_checkpoint, greedy, load_reference
from tests.helpers.server.running import poll

pytestmark = pytest.mark.slow
STEP_TIMEOUT = 30
LIMIT = 8 + STEP_TIMEOUT + 30  # seconds: silence, the wait for the machine, the restart on a loaded machine
LONG = 900  # tokens: longer than it takes to lose a machine
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

    def __init__(self, network: list[str], folder: str, place: Path, flags: list[str], second: list[str] | None):
        """`second` are flags of the second node; None: only the first has a server."""
        self.network, self.uds, self.log, self.second = network, str(place / "s"), place / "log", second
        self.arguments = ["serve", folder, "--dtype", "float32", *flags]
        self.arguments += ["--step-timeout", str(STEP_TIMEOUT), "--max-model-len", "1024", "--uds", self.uds]
        self.processes = [self.start(0)] + ([] if second is None else [self.start(1)])
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=self.uds), base_url="http://q", timeout=120.0)

    def start(self, node: int) -> subprocess.Popen:
        extra = [*self.second, "--headless"] if node else []
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

    def complete(self, token_ids: list[int] | None = None, **fields) -> str:
        answer = self.http.post("/v1/completions", json=BODY | {"return_token_ids": True} | fields)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert token_ids is None or choice["token_ids"] == token_ids
        return choice["text"]

    def stream(self, then, **fields) -> tuple[str, str | None]:
        """Call `then` after the first event of a stream. Returns its text, and its error if it ended with one."""
        text, error = "", None
        with self.http.stream("POST", "/v1/completions", json=BODY | {"stream": True} | fields) as answer:
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

    def ranks(self, node: int, name: str = "quire-worker") -> list[int]:
        """Return the process ids of the ranks or engines of a node, by the namespace of their network."""
        found = subprocess.run(["ip", "netns", "pids", self.network[node]], check=True, capture_output=True, text=True)
        return [pid for pid in map(int, found.stdout.split()) if _name(pid).startswith(name)]

    def stop(self, expected: str) -> None:
        """Stop all servers, the second one first, during a stream, which goes on to its end."""

        def ask() -> None:
            for process in reversed(self.processes):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)

        assert self.stream(ask) == (expected, None)
        assert {process.wait(60) for process in self.processes} == {0}
        assert not [pid for node in (0, 1) for name in ("quire", "ray::Rank") for pid in self.ranks(node, name)]

    def end(self) -> None:
        print(self.log.read_text()[-6000:])  # shown if the test fails
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def served(self, engine: int) -> float:
        """Return the number of tokens that an engine has generated."""
        start = f'vllm:generation_tokens_total{{engine="{engine}"'
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(start)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_an_engine_over_two_machines(network, folder, tmp_path, flag):
    flags = [flag, "2", "--nnodes", "2", "--master-addr", "10.87.0.1"]
    nodes = Nodes(network, folder, tmp_path, flags, ["--node-rank", "1"])
    try:
        nodes.wait_ready()
        assert len(nodes.ranks(0)) == len(nodes.ranks(1)) == 1
        expected = nodes.complete(greedy(load_reference(folder), BODY["prompt"], BODY["max_tokens"])[0])

        # a rank of the other machine dies
        rank = nodes.ranks(1)[0]
        goes_on_or_fails(nodes, lambda: os.kill(rank, signal.SIGKILL), expected)
        if flag == "--tensor-parallel-size":  # the first stage of a pipeline waits for the second as these do
            self_heals(nodes, network, expected)
        nodes.stop(expected)
    finally:
        nodes.end()


@pytest.mark.timeout(600)
def test_two_engines_on_two_machines(network, folder, tmp_path):
    flags = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-address", "10.87.0.1"]
    nodes = Nodes(network, folder, tmp_path, flags, ["--data-parallel-start-rank", "1"])
    try:
        nodes.wait_ready()
        assert len(nodes.ranks(0, "quire-engine")) == len(nodes.ranks(1, "quire-engine")) == 1
        assert {error for _, _, error in both(nodes, lambda: None)} == {None}
        assert nodes.served(0) == nodes.served(1) == LONG

        def lose_machine() -> None:
            os.killpg(nodes.processes[1].pid, signal.SIGKILL)
            nodes.processes[1].wait(20)
            nodes.complete(prompt=[1, 2, 3])  # by the engine that is left

        one_fails(nodes, lose_machine)
        nodes.processes[1] = nodes.start(1)
        is_back(nodes)
        one_fails(nodes, lambda: ip("-n", network[1], "link", "set", "c1", "down"))
        ip("-n", network[1], "link", "set", "c1", "up")
        is_back(nodes)

        # the engine of the other machine dies alone: its stream goes on, or fails if the restart takes too long
        engine = nodes.ranks(1, "quire-engine")[0]
        check(nodes, both(nodes, lambda: os.kill(engine, signal.SIGKILL)), at_most=1)
        is_back(nodes)

        # the server dies and comes back: the other machine joins again
        os.killpg(nodes.processes[0].pid, signal.SIGKILL)
        nodes.processes[0].wait(20)
        nodes.processes[0] = nodes.start(0)
        nodes.wait_ready()
        is_back(nodes)
        nodes.stop(nodes.complete())
    finally:
        nodes.end()


NUMBERS = itertools.count(10)  # of prompts that no engine has seen


def both(nodes: Nodes, then) -> list[tuple[list[int], str, str | None]]:
    """Return prompts, texts and errors of two streams, one of each engine; `then` is called once both have begun."""
    begun, prompts = threading.Barrier(3), [[next(NUMBERS)] * 40 for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(nodes.stream, begun.wait, prompt=prompt, max_tokens=LONG) for prompt in prompts]
        begun.wait(60)
        then()
        return [(prompt, *one.result()) for prompt, one in zip(prompts, made, strict=True)]


def check(nodes: Nodes, found: list[tuple[list[int], str, str | None]], at_most: int) -> int:
    """Compare each stream with the whole text, or its beginning if it ended with an error. Returns how many did."""
    for prompt, text, error in found:
        whole = nodes.complete(prompt=prompt, max_tokens=LONG)
        assert text == whole if error is None else whole.startswith(text), (text, error)
    count = sum(error is not None for _, _, error in found)
    assert count <= at_most
    return count


def one_fails(nodes: Nodes, loss) -> None:
    """The stream of the lost machine ends with an error, the other one goes on."""
    began = time.monotonic()
    found = both(nodes, loss)
    assert time.monotonic() - began < LIMIT
    assert check(nodes, found, at_most=1) == 1


def is_back(nodes: Nodes) -> None:
    before = nodes.served(1)

    def serves() -> bool:
        with ThreadPoolExecutor(2) as pool:
            list(
                pool.map(
                    lambda number: nodes.complete(prompt=[number] * 40, max_tokens=2), (next(NUMBERS), next(NUMBERS))
                )
            )
        return nodes.served(1) > before

    assert poll(serves, 120)


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


@pytest.fixture
def ray_cluster(network) -> Iterator[str]:
    """The address of a Ray cluster with one CPU in each namespace. Its files have a folder of their own: those at the
    usual place would make it the current cluster of the whole machine.
    """
    pytest.importorskip("ray", reason="ray is not installed")
    files = tempfile.mkdtemp(prefix="q", dir="/tmp")  # short: paths of sockets in it are at most 107 bytes
    started = []
    address = "10.87.0.1:6379"
    for i, name in enumerate(network):
        where = ["--head", "--port", "6379", "--include-dashboard", "false"] if i == 0 else ["--address", address]
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where]
        command += ["--num-cpus", "1", "--node-ip-address", f"10.87.0.{i + 1}", "--object-store-memory", "100000000"]
        environment = os.environ | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": files}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(1)
    yield address
    for process in reversed(started):
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait(60)
    shutil.rmtree(files, ignore_errors=True)


@pytest.mark.timeout(600)
def test_a_ray_cluster_of_two_machines(network, ray_cluster, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    flags = ["--distributed-executor-backend", "ray", "--tensor-parallel-size", "2"]
    nodes = Nodes(network, folder, tmp_path, flags, None)
    try:
        nodes.wait_ready()
        assert len(nodes.ranks(0, "ray::Rank")) == len(nodes.ranks(1, "ray::Rank")) == 1
        expected = nodes.complete(greedy(load_reference(folder), BODY["prompt"], BODY["max_tokens"])[0])
        goes_on_or_fails(nodes, lambda: os.kill(nodes.ranks(1, "ray::Rank")[0], signal.SIGKILL), expected)
        nodes.stop(expected)
    finally:
        nodes.end()
