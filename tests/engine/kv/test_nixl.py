"""Blocks that NIXL reads: with its package, where that is installed, and with a stand-in that reads this process's own
memory.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import types

import msgspec
import pytest

from quire.worker.cache.tiers import nixl, remote
from tests.engine.kv.test_transfers import decode, engine_of, prefill

_UCX = {"kv_connector_extra_config": {"backends": ["UCX"]}}


class _Agent:
    """As NIXL's agent. Memory can be read while it is registered and the reader has a description of that time."""

    offered: dict[str, set[tuple[int, int]]] = {}

    def __init__(self, name, config):
        self.name, self.known = name, {}
        self.offered[name] = set()

    def register_memory(self, regions, kind):
        handle = {(address, size) for address, size, *_ in regions}
        self.offered[self.name] |= handle
        return handle

    def deregister_memory(self, handle):
        self.offered[self.name] -= handle

    def get_agent_metadata(self):
        return json.dumps([self.name, sorted(self.offered[self.name])]).encode()

    def add_remote_agent(self, description):
        name, regions = json.loads(description)
        self.known[name] = {tuple(one) for one in regions}
        return name.encode()

    def get_xfer_descs(self, regions, kind):
        return regions[0]

    def initialize_xfer(self, operation, local, there, name):
        assert operation == "READ"
        known = self.known[name] & self.offered[name]
        assert any(start <= there[0] and there[0] + there[1] <= start + size for start, size in known)
        return local, there

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        (here, size, _), (there, _, _) = handle
        ctypes.memmove(here, there, size)
        return "DONE"

    def release_xfer_handle(self, handle):
        pass


@pytest.fixture(params=["stand-in", "package"])
def package(request, monkeypatch):
    monkeypatch.setattr(remote, "this_host", lambda: "")  # otherwise the other process's memory is read directly
    monkeypatch.setattr(remote, "PATIENCE", 2.0)
    if request.param == "package":
        for name in nixl.PACKAGES:
            try:
                importlib.import_module(f"{name}._api")
                return
            except ImportError:
                continue
        pytest.skip("NIXL is not installed")
    api = types.ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = _Agent, lambda backends: backends
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)


@pytest.fixture
def pair(package):
    found = [engine_of(role, more=_UCX) for role in ("kv_producer", "kv_consumer")]
    yield found
    for one in found:
        one.core.executor.shutdown()


@pytest.fixture
def reads(monkeypatch):
    """The sizes of what NIXL reads."""
    found, read = [], nixl.Nixl.read

    def counted(agent, *args):
        content = read(agent, *args)
        found.append(len(content))
        return content

    monkeypatch.setattr(nixl.Nixl, "read", counted)
    return found


def test_nixl_reads_the_blocks(pair, reads):
    producer, consumer = pair
    assert decode(consumer, prefill(producer)) == 40
    assert len(reads) == 10
    consumer.scheduler.kv.reset_prefix_cache()
    producer.tier("remote").clear()  # the memory is withdrawn, and other memory offered
    producer.scheduler.kv.reset_prefix_cache()
    assert decode(consumer, prefill(producer), "again") == 40
    assert len(reads) == 20
    producer.assert_at_rest()


def test_blocks_come_over_tcp_if_nixl_fails(pair, reads, monkeypatch, caplog):
    producer, consumer = pair
    sent = prefill(producer)

    def fail(*args):
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    monkeypatch.setattr(nixl.Nixl, "_wait", fail)
    assert decode(consumer, msgspec.structs.replace(sent, send=False)) == 40
    assert not reads and "NIXL_ERR_REMOTE_DISCONNECT" in caplog.text


@pytest.mark.parametrize("method", ["offer", "description"])
def test_blocks_come_over_tcp_if_nixl_fails_at_the_sender(pair, reads, monkeypatch, caplog, method):
    """Its engine goes on."""
    producer, consumer = pair

    def fail(*args):
        raise RuntimeError("NIXL_ERR_NOT_ALLOWED")

    monkeypatch.setattr(nixl.Nixl, method, fail)
    assert decode(consumer, prefill(producer)) == 40
    assert not reads and "NIXL_ERR_NOT_ALLOWED" in caplog.text
    producer.assert_at_rest()


def test_without_the_package_a_warning_says_what_is_used(monkeypatch, caplog):
    monkeypatch.setattr(nixl, "PACKAGES", ("no_such_package",))
    assert nixl.open_nixl(["UCX"]) is None and "need the package nixl" in caplog.text
    assert nixl.open_nixl([]) is None
