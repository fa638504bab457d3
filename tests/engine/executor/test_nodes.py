"""Ranks of other machines join the first node. Most of them are threads of this process."""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import wait

import pytest

from quire.cli.bench.process import free_port
from quire.configs.config import Config
from quire.engine.executor import nodes
from quire.engine.executor.multiproc import MultiprocExecutor, remote_main
from tests.helpers.server.running import poll


@pytest.fixture
def config(monkeypatch) -> Config:
    monkeypatch.setattr(nodes, "RETRY", 0.05)
    return Config.from_flat(
        model="first", nnodes=3, tensor_parallel_size=3, master_port=free_port(), api_key=["secret-key"]
    )


def meeting(config: Config) -> tuple[nodes.RemoteRanks, threading.Thread]:
    ranks = nodes.RemoteRanks(config, lambda: None)
    thread = threading.Thread(target=ranks.meet, args=("tcp://127.0.0.1:1",), daemon=True)
    thread.start()
    return ranks, thread


def test_a_rank_has_the_settings_of_the_first_node_but_its_own_model_and_no_keys(config):
    ranks, thread = meeting(config)
    own = Config.from_flat(model="second", nnodes=3, tensor_parallel_size=3, master_port=config.parallel.master_port)
    found, init_method, pipe = nodes.join(replace(own, scheduler=replace(own.scheduler, max_num_seqs=7)), 1)
    assert found.model.model == "second" and found.scheduler == config.scheduler and init_method == "tcp://127.0.0.1:1"
    assert found.server.api_key == []
    nodes.join(own, 2)
    thread.join(10)
    assert sorted(ranks.pipes) == [1, 2]
    ranks.pipes[1].send_bytes(b"step")
    assert pipe.recv_bytes() == b"step"


def test_no_key_is_sent(config, monkeypatch):
    received, decode = [], nodes.msgspec.msgpack.decode

    def recorded(data: bytes, **more):
        received.append(data)
        return decode(data, **more)

    monkeypatch.setattr(nodes.msgspec.msgpack, "decode", recorded)
    _, thread = meeting(config)
    for rank in (1, 2):
        nodes.join(config, rank)
    thread.join(10)
    assert len(received) >= 4 and not any(b"secret-key" in data for data in received)


def test_a_machine_that_joins_again_takes_the_place_of_the_one_that_is_gone(config):
    ranks, thread = meeting(config)
    _, _, first = nodes.join(config, 1)
    poll(lambda: 1 in ranks.pipes)
    with ThreadPoolExecutor() as pool:
        again = pool.submit(nodes.join, config, 1)  # the same rank of a second machine: it waits
        time.sleep(0.3)
        assert not again.done()
        first.close()
        _, _, second = again.result(10)
        nodes.join(config, 2)
        thread.join(10)
    ranks.pipes[1].send_bytes(b"step")
    assert second.recv_bytes() == b"step"


def test_connections_that_say_nothing_or_are_reset_do_not_delay_the_ranks(config):
    address = (config.parallel.master_addr, config.parallel.master_port)
    ranks, thread = meeting(config)

    def connected() -> socket.socket | None:
        try:
            return socket.create_connection(address, 5)
        except OSError:
            return None

    started = time.monotonic()
    with poll(connected), socket.create_connection(address, 5) as reset:
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        for rank in (1, 2):
            nodes.join(config, rank)
        thread.join(5)
        assert not thread.is_alive() and sorted(ranks.pipes) == [1, 2]
    assert time.monotonic() - started < nodes.HELLO_TIMEOUT


def test_a_connection_that_is_gone_does_not_join(config, caplog):
    ranks = nodes.RemoteRanks(config, lambda: None)
    ours, theirs = socket.socketpair()
    theirs.close()
    ranks._arrivals.start(functools.partial(ranks._admit, "tcp://127.0.0.1:1"), ours, "10.0.0.9")
    poll(lambda: "a connection from 10.0.0.9 does not join" in caplog.text and ours.fileno() == -1, 5)


class Stuck:
    """A worker that waits for another rank for ever."""

    def __init__(self, *arguments, **where):
        threading.Event().wait()


def run_stuck(config: Config, rank: int, joined) -> None:
    MultiprocExecutor.worker_class = f"{__name__}:Stuck"
    remote_main(config, rank, joined)


@pytest.mark.slow
def test_a_rank_that_waits_for_another_ends_with_its_connection(config):
    ranks, thread = meeting(config)
    context = multiprocessing.get_context("spawn")
    joined = context.Event()
    processes = [context.Process(target=run_stuck, args=(config, rank, joined)) for rank in (1, 2)]
    try:
        for process in processes:
            process.start()
        thread.join(30)
        assert joined.wait(10) and not wait([process.sentinel for process in processes], 2)
        with socket.socket(fileno=os.dup(ranks.pipes[1].fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        assert wait([process.sentinel for process in processes], 30) == [processes[0].sentinel]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(
    ("other", "rank", "message"),
    [
        ({"tensor_parallel_size": 6}, 1, "this node has --nnodes 3, --tensor-parallel-size 6, "),
        ({}, 0, "rank 0 is none of another node"),
        ({}, 3, "rank 3 is none of another node"),
    ],
)
def test_a_rank_that_can_never_join_is_refused(config, other, rank, message):
    ranks, _ = meeting(config)
    with pytest.raises(ValueError, match=message):
        nodes.join(replace(config, parallel=replace(config.parallel, **other)), rank)
    assert not ranks.pipes
