"""Several engines behind one server."""

from __future__ import annotations

import asyncio
import signal

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.configs.config import Config
from quire.engine.messages import EngineStats
from quire.server.engines.pool import PrefixRouter, prefix_hashes
from quire.server.engines.process import _devices
from quire.server.metrics.metrics import Metrics
from quire.server.metrics.pool import MetricsPool
from quire.server.offline.llm import offline_config
from tests.helpers.server.running import poll
from tests.server.api.test_chat import HELLO
from tests.server.test_launch import CHAT, gone, server_process

LONG = list(range(200))


class TestRouter:
    def test_prompts_go_where_they_began_before(self):
        router = PrefixRouter(3)
        first = router.choose(LONG, None, [0, 0, 0])
        other = router.choose([7] * 100, None, [0, 0, 0])
        assert other != first
        assert router.choose([*LONG[:150], 1, 2, 3], None, [0, 0, 0]) == first
        assert router.choose([7] * 300, None, [0, 0, 0]) == other
        assert router.choose([*LONG[:40], *[7] * 100], None, [0, 0, 0]) == first

    def test_short_and_new_prompts_go_around(self):
        router = PrefixRouter(3)
        assert sorted(router.choose([i], None, [0, 0, 0]) for i in range(3)) == [0, 1, 2]
        assert router.choose([9], None, [3, 1, 2]) == 1

    def test_a_busy_engine_is_passed_over(self):
        router = PrefixRouter(2)
        first = router.choose(LONG, None, [0, 0])
        loads = [0, 0]
        loads[first] = 8
        assert router.choose(LONG, None, loads) == first
        loads[first] = 9
        assert router.choose(LONG, None, loads) != first
        assert router.choose(LONG, None, [100, 120]) in (0, 1)

    def test_only_engines_that_are_up(self):
        router = PrefixRouter(2)
        first = router.choose(LONG, None, [0, 0])
        loads = [0, 0]
        loads[first] = None
        assert router.choose(LONG, None, loads) == 1 - first
        assert router.choose(LONG, None, [None, None]) in (0, 1)

    def test_the_client_may_choose(self):
        router = PrefixRouter(2)
        first = router.choose(LONG, None, [0, 0])
        assert router.choose(LONG, None, [0, 0], asked=1 - first) == 1 - first
        assert router.choose([7] * 100, None, [None, 0], asked=0) == 0
        assert router.choose([*[7] * 100, 1], None, [0, 0]) == 0

    def test_a_new_engine_has_seen_nothing(self):
        router = PrefixRouter(2)
        first = router.choose(LONG, None, [0, 0])
        router.forget(first)
        assert router.choose(LONG, None, [0, 0]) == 1 - first

    def test_prefixes(self):
        hashes = list(prefix_hashes(LONG, None))
        assert len(hashes) == 6 and list(prefix_hashes(LONG[:100], None)) == hashes[:3]
        assert set(prefix_hashes(LONG, "salt")).isdisjoint(hashes) and not list(prefix_hashes(LONG[:31], None))


@pytest.mark.parametrize(
    "index, ranks, visible, expected",
    [
        (0, 1, None, "0"),
        (1, 2, None, "2,3"),
        (1, 2, "4,5,6,7", "6,7"),
        (1, 1, "4", ""),
        (0, 2, "GPU-a,GPU-b", "GPU-a,GPU-b"),
    ],
)
def test_each_engine_has_gpus_of_its_own(index, ranks, visible, expected):
    assert _devices(Config.from_flat(tensor_parallel_size=ranks), index, visible) == expected


def test_metrics_of_all_engines_are_one_page():
    pool = MetricsPool([Metrics("m", 100, True, engine) for engine in range(2)])
    pool.for_engine(1).observe_stats(EngineStats(num_running=3))
    pool.observe_http("/v1/models", "GET", 200)
    families = list(text_string_to_metric_families(pool.render().decode()))
    assert len({family.name for family in families}) == len(families)
    running = next(family for family in families if family.name == "vllm:num_requests_running")
    assert {sample.labels["engine"]: sample.value for sample in running.samples} == {"0": 0, "1": 3}
    assert [sample.value for family in families if family.name == "http_requests" for sample in family.samples] == [1]


def test_offline_has_one_engine():
    with pytest.raises(ValueError, match="data_parallel_size: LLM has one engine"):
        offline_config("m", {"data_parallel_size": 2})


@pytest.mark.slow
def test_two_engines_serve_and_one_may_die(model_folder, tmp_path):
    async def ask(http: httpx.AsyncClient, number: int) -> str:
        answer = await http.post(
            CHAT,
            json={
                "messages": [{"role": "user", "content": f"number {number}"}],
                "max_tokens": 100,
                "ignore_eos": True,
                "seed": number,
            },
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    async def crowd(port: int, disturb=None) -> list[str]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            tasks = [asyncio.create_task(ask(http, number)) for number in range(8)]
            if disturb:
                await asyncio.sleep(0.4)
                await asyncio.to_thread(disturb)
            return await asyncio.gather(*tasks)

    with server_process(model_folder, tmp_path, fake="step_delay=0.01", data_parallel_size=2) as server:

        def answered() -> dict[str, float]:
            page = {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}
            return {
                sample.labels["engine"]: sample.value
                for sample in page["vllm:request_success"].samples
                if sample.labels["finished_reason"] == "length"
            }

        server.wait_ready()
        engines = server.engines()
        assert len(engines) == 2
        expected = asyncio.run(crowd(server.port))
        assert answered() == {"0": 4, "1": 4}
        body, name = {"prompt": "number 1", "max_tokens": 3, "ignore_eos": True}, "X-data-parallel-rank"
        for rank in (1, 1, 1, 0):
            assert server.http.post("/v1/completions", json=body, headers={name: str(rank)}).status_code == 200
        assert answered() == {"0": 5, "1": 7}
        for rank in ("2", "-1", "x"):
            answer = server.http.post("/v1/completions", json=body, headers={name: rank})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name

        def kill() -> None:
            engines[1].kill()
            poll(lambda: gone(engines[1]))
            assert server.status("/health") == 200  # the other one serves
            assert server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 3}).status_code == 200

        assert asyncio.run(crowd(server.port, kill)) == expected
        assert "engine 1 died (signal SIGKILL)" in server.log and gone(engines[1]) and not gone(engines[0])
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        poll(lambda: all(gone(child) for child in children), 2)
