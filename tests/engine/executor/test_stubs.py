"""Typed calls: each object has the methods that its protocol declares, and a stub has no others."""

from __future__ import annotations

import inspect
from typing import Protocol

import msgspec
import pytest

from quire.engine.calls import Calls
from quire.engine.executor.stubs import answer, method_names, stub
from quire.engine.messages import EngineCalls
from quire.worker.cache.tiers.remote import RemoteTier
from quire.worker.cache.tiers.slots import SlotTier
from quire.worker.cache.tiers.store import TierStore
from quire.worker.messages import SlotCalls, TierCalls, TierReport, TransferCalls, WorkerCalls
from quire.worker.worker import Worker
from tests.helpers.engine.fake_executor import FakeExecutor

REAL = [(WorkerCalls, Worker), (WorkerCalls, FakeExecutor), (TierCalls, TierStore), (SlotCalls, SlotTier)]
REAL += [(TransferCalls, RemoteTier)]


def signature(cls: type, name: str) -> inspect.Signature:
    return inspect.signature(inspect.getattr_static(cls, name))


@pytest.mark.parametrize("protocol, cls", REAL, ids=lambda cls: cls.__name__)
def test_signatures_are_the_protocols(protocol, cls):
    names = method_names(protocol)
    assert {name: signature(cls, name) for name in names} == {name: signature(protocol, name) for name in names}


def test_the_engines_calls_are_the_servers():
    """Results may come later: then they are generators of the declared type."""
    own = {name for name, value in vars(Calls).items() if inspect.isfunction(value) and name[0] != "_"}
    assert own == set(method_names(EngineCalls))
    for name in own:
        mine, declared = (signature(cls, name) for cls in (Calls, EngineCalls))
        assert mine.parameters == declared.parameters, name
        later = {"Later | None": "dict[str, int] | None"}
        assert later.get(mine.return_annotation, mine.return_annotation) == declared.return_annotation, name


class Point(msgspec.Struct, array_like=True):
    x: int
    tag: tuple[str, bytes] = ("", b"")


class Geometry(Protocol):
    def moved(self, point: list[int], by: int = 1) -> Point: ...

    def both(self) -> tuple[int, int]: ...

    def reset(self) -> None: ...


class Plane:
    def moved(self, point: list[int], by: int = 1) -> Point:
        return Point(point[0] + by, ("p", b"q"))

    def both(self) -> tuple[int, int]:
        return 1, 2

    def reset(self) -> None:
        return None

    def secret(self) -> None:
        raise AssertionError("the protocol does not declare it")


def test_a_stub_calls_across_msgpack():
    def send(name: str, *args: object) -> object:
        method, sent = msgspec.msgpack.decode(msgspec.msgpack.encode((name, args)))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answer(Geometry, Plane(), method, sent)))

    far = stub(Geometry, send)
    assert far.moved([3]) == Point(4, ("p", b"q")) and far.moved([3], 5).x == 8
    assert far.both() == (1, 2) and far.reset() is None
    assert not hasattr(far, "secret")
    with pytest.raises(ValueError, match="unknown method 'secret': use one of moved, both, reset"):
        answer(Geometry, Plane(), "secret", [])


def test_a_report_in_this_process_is_not_copied():
    report = TierReport({"ram": 1}, {}, [], [], [("ram", b"key", True)])
    tiers = stub(TierCalls, lambda name, *args: report)
    assert tiers.stats(False) is report
