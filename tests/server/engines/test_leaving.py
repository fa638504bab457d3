"""An engine whose machine ends it in order, over scripted engines."""

from __future__ import annotations

from types import SimpleNamespace

from quire.server.engines.pool import EnginePool
from quire.server.frontends.messages import Engine, EngineLeaves
from quire.server.frontends.parent import FrontendGroup
from tests.helpers.server.fake_engine import FakeEngine
from tests.server.engines.test_engine_client import asynchronous, connected, request


@asynchronous
async def test_an_engine_that_leaves_finishes_its_requests_and_gets_no_others():
    """The others go to another engine, or wait for the next one if the client chose this."""
    async with connected() as (client, engine), connected() as (other, second):
        clients = EnginePool([client, other])
        streams = [clients.generate(request("a", engine=0))]
        await engine.receive()
        assert not client.is_idle
        client.on_leaving()
        streams += [clients.generate(request(name)) for name in "bc"]
        assert {(await second.receive()).request_id for _ in "bc"} == {"b", "c"}
        streams.append(clients.generate(request("d", engine=0)))
        await engine.output("a", 5, finish_reason="stop")
        assert [output.finish_reason async for output in streams[0]] == ["stop"]
        assert await engine.receives_nothing() and client.is_idle
        async with FakeEngine() as successor:
            await client.connect(successor.address)
            await successor.start()
            assert (await successor.receive()).request_id == "d" and not client.is_leaving
        for stream in streams:
            await stream.aclose()


def test_every_frontend_hears_of_it_also_one_that_starts_later():
    sent: list[object] = []
    group = FrontendGroup.__new__(FrontendGroup)
    group.addresses, group._turns, group.ending = ["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"], [], False
    group.phase = group.load = group.adapter_list = None
    group.frontends, group._pool = [SimpleNamespace(send=sent.append, num_open=[0, 0])], None
    group._share_load, group.broadcast = lambda: None, sent.append
    clients = group.connect(lambda *_: None, lambda *_: None)
    clients[1].on_leaving()
    assert sent == [EngineLeaves(1)]
    sent.clear()
    group._sync(group.frontends[0])
    assert sent == [Engine(0, "tcp://10.0.0.1:1"), Engine(1, "tcp://10.0.0.2:1"), EngineLeaves(1)]
