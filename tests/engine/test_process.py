"""A real engine process with the fake executor: messages over its socket, idling, and every way to end."""

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

from quire.engine.messages import (
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
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import VOCAB, fake_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


class EngineProcess:
    def __init__(self, address: str, fake: str = "", **settings):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire.engine.core", address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "FAKE_EXECUTOR": fake, "OMP_NUM_THREADS": "1"},
        )
        payload = msgspec.msgpack.encode(fake_config(**settings))
        self.process.stdin.write(len(payload).to_bytes(4, "big") + payload)
        self.process.stdin.flush()
        self.address = address

    def ask_to_end(self) -> None:
        """As its parent does."""
        self.process.stdin.write(b"end")
        self.process.stdin.flush()

    def wait(self) -> tuple[int, float]:
        """(exit code, seconds until it ended)"""
        start = time.monotonic()
        return self.process.wait(20), time.monotonic() - start


class Server:
    """The server's end of the socket."""

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
    """Loading, answering several servers, idling below 1 % of a core, and a clean exit."""
    engine, server = start("load_delay=0.3", steps_in_flight=2)
    messages = server.until(Ready)
    assert {"loading weights"} < {message.phase for message in messages if isinstance(message, Progress)}
    assert messages[-1].depth == 2 and messages[-1].worker.vocab_size == VOCAB
    other = Server(engine)
    assert isinstance(other.receive(), Ready)
    for i, each in enumerate((server, other)):
        assert each.generate("same id", [i, 2, 3], max_tokens=20) == expected_tokens(
            [i, 2, 3], SamplingParams(max_tokens=20), 4096, VOCAB
        )
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

    engine.ask_to_end()
    assert engine.wait()[0] == 0
    assert b"dropped a malformed message" in engine.process.stderr.read()


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
        time.sleep(1)  # the engine is in its first step, which takes 5 seconds
    engine.process.stdin.close()
    code, seconds = engine.wait()
    assert code == 1 and seconds < 1


@pytest.mark.parametrize("when", ["loading", "stepping", "idle"])
def test_a_message_is_a_clean_end(start, when):
    engine, server = start({"loading": "load_delay=10", "stepping": "step_delay=0.05", "idle": ""}[when])
    if when == "loading":
        server.until(Progress)
    else:
        server.until(Ready)
    if when == "stepping":
        server.send(AddRequest("long", [1], SamplingParams(max_tokens=4000)))
        server.until(StepOutputs)
    engine.ask_to_end()
    code, seconds = engine.wait()
    assert code == 0 and seconds < 2
    assert engine.process.stderr.read() == b""


def test_sigterm_is_for_the_parent(start):
    """The engine ignores SIGTERM: the whole process group may receive it while the parent lets requests finish."""
    engine, server = start("step_delay=0.01")
    server.until(Ready)
    engine.process.terminate()
    assert len(server.generate("a", [1], max_tokens=50)) == 50 and engine.process.poll() is None


def test_no_complaint_about_a_server_that_leaves_in_order(start):
    engine, server = start()
    server.until(Ready)
    other = Server(engine)
    assert isinstance(other.receive(), Ready)
    other.generate("a", [1], max_tokens=3)
    other.socket.close()
    for number in range(3):
        server.generate(str(number), [1], max_tokens=3)
        time.sleep(0.3)  # until statistics are due
    engine.ask_to_end()
    assert engine.wait()[0] == 0 and engine.process.stderr.read() == b""


HOLDS_THE_INTERPRETER = """
import sys, threading
from tests.helpers.engine import fake_executor as fake

def result(self):
    if self.output.step == 5:
        print("busy", flush=True)
        3 ** (10 ** 9)  # minutes in C, without a look at signals or at other threads
    return self.output

fake._Result.result = result
sys.argv = ["engine", sys.argv[1]]
from quire.engine.core import main
main()
"""

PARENT = """
import subprocess, sys
import msgspec
from tests.helpers.engine.harness import fake_config
engine = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE)
config = msgspec.msgpack.encode(fake_config())
engine.stdin.write(len(config).to_bytes(4, "big") + config)
engine.stdin.flush()
print(engine.pid, flush=True)
engine.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_the_parents_death_ends_an_engine_whose_interpreter_is_held(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, HOLDS_THE_INTERPRETER, address], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        engine = psutil.Process(int(parent.stdout.readline()))
        try:
            socket = zmq.Context.instance().socket(zmq.DEALER)
            socket.connect(address)
            socket.send(msgspec.msgpack.encode(AddRequest("a", [1], SamplingParams(max_tokens=50))))
            assert parent.stdout.readline() == "busy\n"
            parent.kill()
            parent.wait()
            psutil.wait_procs([engine], timeout=5)
            assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        finally:
            socket.close(linger=0)
            if engine.is_running():
                engine.kill()


def test_a_start_that_cannot_succeed_says_why(start):
    engine, server = start("speed=9")
    assert server.until(EngineDead)[-1] == EngineDead("FAKE_EXECUTOR: unknown option speed")
    assert engine.wait()[0] == 1
    assert engine.process.stderr.read() == b"", "the server says it"


def test_a_start_that_cannot_succeed_says_why_to_nobody(start):
    engine, server = start("speed=9")
    server.socket.close()
    assert engine.wait()[0] == 1
    assert engine.process.stderr.read().count(b"unknown option speed") == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failing_step_is_the_end_of_the_engine(start, depth):
    engine, server = start("fail_at_step=5", steps_in_flight=depth)
    server.until(Ready)
    server.send(AddRequest("a", [1], SamplingParams(max_tokens=100)))
    *outputs, dead = server.until(EngineDead)
    assert dead == EngineDead("RuntimeError: injected failure of step 5")
    assert [t for message in outputs for output in message.outputs for t in output.new_token_ids] == expected_tokens(
        [1], SamplingParams(max_tokens=2), 4096, VOCAB
    )
    assert engine.wait()[0] == 1
    assert engine.process.stderr.read().count(b"the engine failed") == 1


def test_imports_are_not_collected():
    code = """
import gc
from quire.engine.process import no_collection
frozen = gc.get_freeze_count()
try:
    with no_collection():
        assert not gc.isenabled()
        raise ImportError
except ImportError:
    assert gc.isenabled() and gc.get_freeze_count() > frozen + 1000
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_descendants_are_killed_whatever_their_session():
    """As in a Ray cluster: a child in its own session, and its child in another session."""
    code = """
import subprocess, sys, time
from quire.engine.process import kill_descendants
sleeper = "import time; print(1, flush=True); time.sleep(100)"
start = f"subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
middle = f"import subprocess, sys, time; {start}; time.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", middle], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print("there", flush=True)
sys.stdin.readline()
kill_descendants()
print(child.wait(), flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "there\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 2
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"-{int(signal.SIGKILL)}\n" and process.poll() is None
        psutil.wait_procs(below, timeout=10)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in below)
        process.stdin.close()
