"""A real engine process with the fake executor: messages over its socket, rest, and every way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from engine.executor.fake import expected_tokens
from engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CallResult,
    EngineDead,
    FromEngine,
    Hello,
    Progress,
    Ready,
    SamplingParams,
    StepOutputs,
)
from tests.engine.harness import VOCAB, fake_config

ROOT = Path(__file__).parent.parent.parent


class EngineProcess:
    def __init__(self, address: str, fake: str = "", **settings):
        self.process = subprocess.Popen([sys.executable, "-m", "engine.core", address], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                                        env={**os.environ, "QUIRE_FAKE": fake, "OMP_NUM_THREADS": "1"})
        payload = msgspec.msgpack.encode(fake_config(**settings))
        self.process.stdin.write(len(payload).to_bytes(4, "big") + payload)
        self.process.stdin.flush()
        self.address = address

    def wait(self) -> tuple[int, float]:
        """(exit code, seconds until it ended)"""
        start = time.monotonic()
        return self.process.wait(20), time.monotonic() - start


class Server:
    """The other end of the socket."""

    def __init__(self, engine: EngineProcess):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(engine.address)
        self.send(Hello())

    def send(self, message) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self):
        assert self.socket.poll(20_000), "the engine does not answer"
        return msgspec.msgpack.decode(self.socket.recv(), type=FromEngine)

    def until(self, kind: type) -> list:
        messages = [self.receive()]
        while not isinstance(messages[-1], kind):
            messages.append(self.receive())
        return messages

    def generate(self, request_id: str, prompt: list[int], **sampling) -> list[int]:
        self.send(AddRequest(request_id, prompt, SamplingParams(**sampling)))
        tokens = []
        while True:
            message = self.receive()
            for output in message.outputs if isinstance(message, StepOutputs) else []:
                assert output.request_id == request_id and output.error is None
                tokens += output.new_token_ids
                if output.finish_reason:
                    return tokens


@pytest.fixture
def start(tmp_path):
    started = []

    def start(fake: str = "", **settings) -> tuple[EngineProcess, Server]:
        engine = EngineProcess(f"ipc://{tmp_path}/{len(started)}", fake, **settings)
        server = Server(engine)
        started.append((engine, server))
        return engine, server

    yield start
    for engine, server in started:
        server.socket.close()
        if engine.process.poll() is None:
            engine.process.kill()
        engine.process.wait()
        engine.process.stdin.close()
        engine.process.stderr.close()


def test_a_life(start):
    """Loading, answering several servers, resting below 1 % of a core, and a clean end."""
    engine, server = start("load_delay=0.3", steps_in_flight=2)
    messages = server.until(Ready)
    assert {"loading weights"} < {message.phase for message in messages if isinstance(message, Progress)}
    assert messages[-1].depth == 2 and messages[-1].worker.vocab_size == VOCAB
    other = Server(engine)
    assert isinstance(other.receive(), Ready)
    for i, each in enumerate((server, other)):
        assert each.generate("same id", [i, 2, 3], max_tokens=20) == expected_tokens([i, 2, 3], SamplingParams(max_tokens=20), 4096, VOCAB)
    other.socket.close()

    time.sleep(0.5)
    process = psutil.Process(engine.process.pid)
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) < 0.02
    if sys.platform == "linux":
        assert Path(f"/proc/{engine.process.pid}/comm").read_text().strip() == "quire-engine"

    os.kill(engine.process.pid, signal.SIGINT)
    server.send(Call(7, "reset_prefix_cache"))
    assert server.until(CallResult)[-1] == CallResult(7, True), "SIGINT is the parent's business"
    server.socket.send(b"\xc1 no message of ours")
    assert len(server.generate("still there", [1], max_tokens=3)) == 3

    engine.process.terminate()
    assert engine.wait()[0] == 0
    assert b"none of ours" in engine.process.stderr.read()


def test_abort_in_the_middle(start):
    _, server = start("step_delay=0.01")
    server.until(Ready)
    server.send(AddRequest("long", [1], SamplingParams(max_tokens=4000)))
    server.until(StepOutputs)
    server.send(AbortRequests(["long"]))
    server.send(Call(1, "stats"))
    assert server.until(CallResult)[-1].value["num_running"] == 0


@pytest.mark.parametrize("busy", [False, True])
def test_the_end_of_stdin_ends_it_at_once(start, busy):
    engine, server = start("step_delay=5" if busy else "")
    if not busy:
        server.until(Ready)
    else:
        time.sleep(1)  # in its first step, which takes 5 seconds
    engine.process.stdin.close()
    code, seconds = engine.wait()
    assert code == 1 and seconds < 1


@pytest.mark.parametrize("when", ["loading", "stepping", "idle"])
def test_sigterm_is_a_clean_end(start, when):
    engine, server = start({"loading": "load_delay=10", "stepping": "step_delay=0.05", "idle": ""}[when])
    if when == "loading":
        server.until(Progress)
    else:
        server.until(Ready)
    if when == "stepping":
        server.send(AddRequest("long", [1], SamplingParams(max_tokens=4000)))
        server.until(StepOutputs)
    engine.process.terminate()
    code, seconds = engine.wait()
    assert code == 0 and seconds < 2
    assert engine.process.stderr.read() == b""


def test_a_start_that_cannot_succeed_says_why(start):
    engine, server = start("speed=9")
    assert server.until(EngineDead)[-1] == EngineDead("QUIRE_FAKE: unknown option speed")
    assert engine.wait()[0] == 1
    errors = engine.process.stderr.read().decode()
    assert errors.count("unknown option speed") == 1 and "Traceback" not in errors


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_is_the_end_of_the_engine(start, depth):
    engine, server = start("fail_at_step=5", steps_in_flight=depth)
    server.until(Ready)
    server.send(AddRequest("a", [1], SamplingParams(max_tokens=100)))
    *outputs, dead = server.until(EngineDead)
    assert dead == EngineDead("RuntimeError: step 5 was to fail")
    assert [t for message in outputs for output in message.outputs for t in output.new_token_ids] == expected_tokens([1], SamplingParams(max_tokens=2), 4096, VOCAB)
    assert engine.wait()[0] == 1
    assert engine.process.stderr.read().count(b"the engine failed") == 1


def test_descendants_are_killed_whatever_their_session():
    """As those of a Ray cluster: a child in a session of its own, and its child in another."""
    code = """
import subprocess, sys, time
from engine.process import kill_descendants
sleeper = "import time; print(1, flush=True); time.sleep(100)"
middle = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True); time.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", middle], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("there", flush=True)
sys.stdin.readline()
kill_descendants()
print(child.wait(), flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "there\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 2
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"-{int(signal.SIGKILL)}\n" and process.poll() is None
        psutil.wait_procs(below, timeout=10)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in below)
        process.stdin.close()
