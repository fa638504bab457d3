"""What is answered before the routes are imported, and what is held until then."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from quire.server.errors import Unavailable
from quire.server.http.startup_gate import StartupGate
from quire.server.keys.caller import Caller
from quire.server.web.pages import PAGES


def refuse() -> None:
    raise Unavailable("The model is loading.", code="model_loading", retry_after=2)


def answer(path: str, opens: bool = True) -> list[int]:
    """The statuses sent for GET `path`; the routes come while the request waits, unless it is answered before."""
    sent: list[int] = []

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    async def routes(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def run() -> None:
        state = SimpleNamespace(status="loading", require_ready=refuse, health=lambda: {"status": "loading"})
        gate = StartupGate(state)
        scope = {"type": "http", "path": path, "method": "GET", "headers": [], "caller": Caller("r")}
        asking = asyncio.create_task(gate(scope, None, send))
        for _ in range(3):
            await asyncio.sleep(0)
        if opens:
            gate.app = routes
        else:
            state.status = "failed"
        await asking

    asyncio.run(run())
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", *sorted(PAGES)])
def test_pages_and_models_are_held(path):
    """A browser shows an error until somebody reloads it."""
    assert answer(path) == [200]
    assert answer(path, opens=False) == [503]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics", "/nothing"])
def test_others_are_told_to_come_again(path):
    assert answer(path) == [503]


def test_probes_are_answered():
    assert answer("/live") == [200] and answer("/ready") == answer("/health") == [503]
