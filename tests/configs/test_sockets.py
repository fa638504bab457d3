"""Owners of sockets that the garbage collector finds in a cycle end at once. Addresses at which a machine listens."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys

import pytest

from quire.configs import sockets
from tests.helpers.server.running import poll

OWNERS = {
    "engine": "from quire.engine.ipc import ServerSocket\nowner = ServerSocket('ipc://{folder}/engine')",
    "client": (
        "import asyncio\nfrom quire.server.engines.client import EngineClient\n"
        "async def connected():\n"
        "    client = EngineClient()\n    await client.connect('ipc://{folder}/engine')\n    return client\n"
        "owner = asyncio.run(connected())"
    ),
    "publisher": (
        "from quire.configs.kv_events import KVEventsSettings\nfrom quire.engine.kv.publisher import KVEventPublisher\n"
        "owner = KVEventPublisher(KVEventsSettings(endpoint='ipc://{folder}/events'))\n"
        "owner.stop()"
    ),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_cycle_of_an_owner_is_collected(owner, tmp_path):
    made = OWNERS[owner].format(folder=tmp_path)
    script = f"import gc\n{made}\nowner.cycle = owner\ndel owner\ngc.collect()\nprint('over')"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "over\n", run.stderr


def test_silent_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(sockets, "MAX_ARRIVALS", 2)
    arrivals, handled = sockets.Arrivals("test"), []
    pairs = [socket.socketpair() for _ in range(4)]

    def handle(arrived: socket.socket, peer: str) -> None:
        handled.append(peer)

    def start(number: int) -> None:
        arrivals.start(handle, pairs[number][0], f"peer {number}")

    for number in range(3):
        start(number)
    assert pairs[2][1].recv(1) == b""  # the third was closed
    arrivals.identified()
    start(3)
    poll(lambda: sorted(handled) == ["peer 0", "peer 1", "peer 3"], 5)
    for one in itertools.chain(*pairs):
        one.close()


def test_the_name_of_a_machine_may_be_known_a_little_later(monkeypatch):
    class Socket(socket.socket):
        attempts = 0

        def bind(self, address: tuple[str, int]) -> None:
            Socket.attempts += 1
            if address[0] == "pod-0" and (Socket.attempts < 3 or never):
                raise socket.gaierror(-2, "Name or service not known")
            super().bind(("127.0.0.1", address[1]))

    never = False
    monkeypatch.setattr(sockets.socket, "socket", Socket)
    monkeypatch.setattr(sockets, "_NAME_RETRY", 0.01)
    with sockets.bind("pod-0", 0, "--master-addr pod-0") as bound:
        assert Socket.attempts == 3
        bound.listen()
        with pytest.raises(ValueError, match="--port 1: cannot listen: Address already in use"):
            sockets.bind("127.0.0.1", bound.getsockname()[1], "--port 1")
    monkeypatch.setattr(sockets, "NAME_TIMEOUT", 0.05)
    never = True
    with pytest.raises(ValueError, match="--master-addr pod-0: cannot listen: Name or service not known"):
        sockets.bind("pod-0", 0, "--master-addr pod-0")
