"""The soak of mixed traffic: every kind of request against a server, and the arithmetic of slopes."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from benchmarks import kill_rounds, soak
from benchmarks.server import ROOT
from benchmarks.soak_traffic import KINDS, send
from tests.helpers.server.running import MODEL, running_server
from tests.server.media.conftest import FAKE, write_seeing_model


def test_slopes_and_their_noise():
    rng = random.Random(1)
    flat = [(i / 1000, 100 + rng.gauss(0, 1)) for i in range(600)]
    rise, noise = soak.fitted(flat)
    assert abs(rise) < 2 * noise
    rise, noise = soak.fitted([(hours, size + 50 * hours) for hours, size in flat])
    assert rise - noise > 40 and rise + noise < 60


@pytest.mark.slow
def test_every_kind_is_answered(tmp_path):
    """With an engine that computes nothing; the soak itself has a model."""

    async def all_kinds(url: str) -> list:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            rng = random.Random(0)
            return await asyncio.gather(*(send(http, kind, rng, MODEL) for kind in KINDS for _ in range(3)))

    with running_server(write_seeing_model(tmp_path), fake=FAKE, max_model_len="2048") as server:
        server.wait_ready()
        outcomes = asyncio.run(all_kinds(server.url))
        assert {one.kind for one in outcomes} == {kind.name for kind in KINDS}
        assert not [one for one in outcomes if one.is_wrong]
        assert not soak.is_idle(server)


def test_a_wrong_answer_is_seen():
    broken = httpx.MockTransport(lambda request: httpx.Response(200, text='data: {"error":{"message":"x"}}\n\n'))

    async def one() -> object:
        async with httpx.AsyncClient(base_url="http://x", transport=broken) as http:
            return await send(http, KINDS[0], random.Random(0), MODEL)

    assert asyncio.run(one()).is_wrong


@pytest.mark.slow
def test_two_thousand_streams_end():
    with kill_rounds.serving(ROOT, "--max-num-queued-reqs", "0", fake="step_delay=0.01") as server:
        texts, _ = kill_rounds.streams(server, 2000, 20)
        assert all(texts)
        assert server.status() == 200


@pytest.mark.slow
def test_a_short_soak():
    assert soak.main(["--minutes", "0.2", "--clients", "4", "--limit", "1e9"]) == 0
