"""Engines of another machine, on this one: a server with one engine of its own, and another one that joins it."""

from __future__ import annotations

import errno
import itertools
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace

import msgspec
import pytest

from quire.configs.sockets import watchful
from quire.server.engines import remote
from quire.server.startup import remote_engines
from quire.server.startup.remote_engines import RemoteEngines
from tests.helpers.server.running import RunningServer, make_config, poll
from tests.server.test_launch import free_port


@pytest.fixture
def pair(model_folder, monkeypatch) -> Iterator[tuple[RunningServer, Callable[..., RemoteEngines]]]:
    monkeypatch.setenv("FAKE_EXECUTOR", "step_delay=0.02")
    monkeypatch.setattr(remote_engines, "PAUSE", 0.1)
    settings = {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_rpc_port": free_port()}
    server = RunningServer(make_config(model_folder, **settings))
    poll(lambda: hasattr(server, "launcher"), 20)

    def other(**more: int) -> RemoteEngines:
        return RemoteEngines(make_config(model_folder, **settings | {"data_parallel_start_rank": 1} | more))

    yield server, other
    assert server.stop() == 0


def during(engines: RemoteEngines, work: Callable[[], None]) -> int:
    """Run the engines, whose signal handlers need this thread, until `work` is done in another one."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        working.add_done_callback(lambda _: engines.end(at_once=True))
        code = engines.run()
        working.result()
    return code


def served(server: RunningServer, engine: int) -> float:
    start = f'vllm:generation_tokens_total{{engine="{engine}"'
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(start)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def ask(server: RunningServer, number: int, max_tokens: int = 10) -> str:
    body = {"prompt": [number] * 40, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    return answer.text


def ask_both(server: RunningServer, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Send four requests, and return them once both engines work on some."""
    asked = [pool.submit(ask, server, 10 + i, 60) for i in range(4)]
    poll(lambda: served(server, 0) and served(server, 1), 20)
    return asked


def is_whole(asked: Future[str]) -> bool:
    return asked.result().endswith("data: [DONE]\n\n") and '"error"' not in asked.result()


@pytest.mark.slow
def test_requests_finish_while_both_machines_end(pair):
    server, other = pair
    engines = other()

    def work() -> None:
        server.wait_ready()
        with ThreadPoolExecutor(4) as pool:
            asked = ask_both(server, pool)
            engines.end()  # as SIGTERM does
            server.signal()
            assert all(map(is_whole, asked))

    assert during(engines, work) == 0


@pytest.mark.slow
def test_an_engine_that_ends_comes_back(pair):
    server, other = pair
    engines = other()

    def work() -> None:
        server.wait_ready()
        numbers, before = itertools.count(100), served(server, 1)
        remote.wake_and_close(joined(server)._pipe)

        def is_back() -> bool:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda number: ask(server, number, 2), itertools.islice(numbers, 2)))
            return served(server, 1) > before

        poll(is_back, 30)

    assert during(engines, work) == 0


def joined(server: RunningServer) -> remote.RemoteEngine:
    return next(one.engine for one in server.launcher.engines.supervisors if one.engine.is_remote)


def test_the_server_refuses_other_sizes(pair, caplog):
    _, other = pair
    assert during(other(data_parallel_size=3), lambda: poll(lambda: "refuses" in caplog.text, 20)) == 1
    assert "--data-parallel-size 3" in caplog.text and "the one that serves has --data-parallel-size 2" in caplog.text


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (remote.Join(1, (2, 1, 1), "0.0.1"), "has quire 0.0.1"),
        (remote.Join(0, (2, 1, 1), remote.own_version(), "same"), "engine 0 runs on the machine that serves"),
        (remote.Join(2, (2, 1, 1), remote.own_version(), "same"), "there is no such engine"),
        (remote.Join(1, (2, 1, 1), remote.own_version(), "other"), "config.json or the weights of the model"),
    ],
)
def test_a_wrong_engine_is_told_why(pair, hello, message):
    server, _ = pair
    if hello.model == "same":
        hello.model = remote.identity_of(server.config)
    address = server.config.parallel.rendezvous

    def connected() -> socket.socket | None:
        try:
            return socket.create_connection(address, 2)
        except OSError:
            return None

    with watchful(poll(connected, 20)) as pipe:
        pipe.send_bytes(msgspec.msgpack.encode(hello))
        answer = msgspec.msgpack.decode(pipe.recv_bytes(), type=remote.Joined)
    assert message in answer.refusal and not answer.config


@pytest.fixture
def engines(model_folder, monkeypatch) -> RemoteEngines:
    """Those of a machine whose server is a test."""
    monkeypatch.setattr(remote_engines, "PAUSE", 0.0)
    settings = {"data_parallel_size": 2, "data_parallel_start_rank": 1, "data_parallel_rpc_port": free_port()}
    return RemoteEngines(make_config(model_folder, **settings, kv_transfer_port=6001, kv_disk="/own"))


def test_failures_of_this_machine_are_told_and_repeated_seldom(engines, monkeypatch, caplog):
    caplog.set_level("INFO")
    gone, full = remote_engines.ServerGone("Connection refused"), OSError(errno.ENOSPC, "No space left on device")
    errors = iter([gone, gone, full, gone, full, msgspec.DecodeError("not msgpack")])

    def serve(index: int) -> None:
        raise next(errors)

    monkeypatch.setattr(engines, "_serve", serve)
    engines._keep(1)
    told = [(record.levelname, record.message.partition(": ")[0]) for record in caplog.records]
    assert [level for level, _ in told] == ["INFO", "ERROR", "ERROR"] and engines._was_refused
    assert "is not there (Connection refused)" in caplog.text and "No space left on device" in caplog.text
    assert "does not answer engine 1 as a quire server" in caplog.text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, remote_engines.ServerGone),
        (b"HTTP/1.1 400", msgspec.ValidationError),
        (msgspec.msgpack.encode(remote.Joined("because")), ValueError),
    ],
)
def test_answers_to_an_engine(engines, answer, expected):
    with socket.create_server(engines._parallel.rendezvous) as listener, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(engines._serve, 1)
        with watchful(listener.accept()[0]) as pipe:
            assert msgspec.msgpack.decode(pipe.recv_bytes(), type=remote.Join).engine == 1
            if answer is not None:
                pipe.send_bytes(answer)
        assert type(serving.exception(10)) is expected


def test_descriptors_that_this_machine_lacks_are_not_the_servers_fault(engines, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(remote_engines.socket, "create_connection", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        engines._serve(1)


def test_addresses_and_folders_are_those_of_this_machine(engines, model_folder, caplog):
    theirs = {"kv_transfer_host": "10.0.0.1", "kv_transfer_port": 7000, "kv_disk": "/theirs", "max_num_seqs": 7}
    found = engines._own_settings(make_config(model_folder, **theirs))
    cache = found.cache
    assert (cache.kv_transfer_host, cache.transfer.port, cache.kv_disk) == ("127.0.0.1", 6001, "/own")
    assert found.scheduler.max_num_seqs == 7
    text = json.dumps({"kv_connector": "NixlConnector", "kv_ip": "10.0.0.2"})
    own = make_config(model_folder, kv_transfer_config=text).cache
    moved = make_config(model_folder, **theirs).cache.with_places_of(own)
    assert (moved.transfer.host, moved.transfer.port, moved.kv_disk) == ("10.0.0.2", 7000, None)


@pytest.mark.slow
def test_requests_finish_while_one_machine_ends(pair):
    """Those that come meanwhile go to the engine that stays."""
    server, other = pair
    engines = other()

    def work() -> None:
        server.wait_ready()
        with ThreadPoolExecutor(16) as pool:
            asked = ask_both(server, pool)
            engines.end()  # as SIGTERM does
            client = server.launcher.engines.supervisors[1].client
            poll(lambda: client.is_leaving, 5)
            open_then = client.num_open
            asked += [pool.submit(ask, server, 20 + i, 5) for i in range(8)]
            poll(lambda: asked[-1].done(), 20)
            assert client.num_open <= open_then
            assert all(map(is_whole, asked))
            poll(lambda: server.launcher.engines.supervisors[1].client.ready is None, 20)

    started = time.monotonic()
    assert during(engines, work) == 0
    assert time.monotonic() - started < engines._config.server.shutdown_timeout


def test_a_machine_says_that_its_engine_leaves(engines):
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as pipe, Connection(theirs.detach()) as server, ThreadPoolExecutor(1) as pool:
        process = subprocess.Popen(["sleep", "30"])
        engine = SimpleNamespace(pid=process.pid, index=1, terminate=lambda timeout: process.kill())
        watching = pool.submit(engines._watch, engine, pipe)
        engines.end()
        assert server.recv_bytes() == remote.LEAVING
        assert process.poll() is None  # until its requests have ended
        server.send_bytes(remote.END)
        watching.result(10)
        assert process.wait(10) == -9


def test_the_server_hears_that_an_engine_leaves():
    ours, theirs = socket.socketpair()
    engine = remote.RemoteEngine(None, 1, SimpleNamespace(forget=lambda engine: None))
    with Connection(theirs.detach()) as machine, ThreadPoolExecutor(2) as pool:
        engine.on_joined(Connection(ours.detach()), "tcp://10.0.0.1:1")
        following, leaving = pool.submit(engine.follow), pool.submit(engine.wait_for_drain)
        machine.send_bytes(remote.LEAVING)
        assert leaving.result(10)
        engine.ask_to_end()
        assert machine.recv_bytes() == remote.END
        machine.close()
        following.result(10)
    assert not engine.wait_for_drain()
