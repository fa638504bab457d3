"""Fakes an engine that a test scripts message by message, over a ROUTER socket on the test's own event loop."""

from __future__ import annotations

import asyncio
import tempfile

import msgspec
import zmq
import zmq.asyncio

from quire.engine.messages import (
    EngineOutput,
    FromEngine,
    Hello,
    MemoryPlan,
    Progress,
    Ready,
    StepOutputs,
    ToEngine,
    WorkerReady,
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToEngine).decode


def ready(max_num_seqs: int = 8) -> Ready:
    return Ready(WorkerReady(64, 16, 4096, max_num_seqs, 2048, 1000, 1, MemoryPlan("fake", 0, 0, 0, 0, 0, 0, 0)), 1)


class FakeEngine:
    """Binds a socket at `engine.address`: `async with FakeEngine() as engine`."""

    async def __aenter__(self) -> FakeEngine:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._folder = tempfile.TemporaryDirectory(prefix="quire-test-")
        self.address = f"ipc://{self._folder.name}/engine"
        self._socket.bind(self.address)
        self._client = b""
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._socket.close()
        self._context.term()
        self._folder.cleanup()

    async def receive(self) -> ToEngine:
        self._client, frame = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        return _decode(frame)

    async def receives_nothing(self, seconds: float = 0.1) -> bool:
        return not await self._socket.poll(1000 * seconds)

    async def send(self, message: FromEngine) -> None:
        await self._socket.send_multipart([self._client, _encode(message)])

    async def start(self, max_num_seqs: int = 8) -> None:
        """Receive the client's Hello and send Ready."""
        assert isinstance(await self.receive(), Hello)
        await self.send(Progress("loading weights", 0.5))
        await self.send(ready(max_num_seqs))

    async def output(self, request_id: str, *token_ids: int, **fields) -> None:
        await self.send(StepOutputs([EngineOutput(request_id, list(token_ids), **fields)]))
