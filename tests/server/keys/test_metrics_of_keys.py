"""What each key reads in /metrics: a client its own series, administrators and keys with `metrics` all."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.helpers.server.running import poll, running_server
from tests.server.keys.test_keys import BODY, CHAT, bearer

KEYS = [
    {"name": "alice", "key": "k-alice"},
    {"name": "bob", "key": "k-bob", "max_concurrent_requests": 5},
    {"name": "prom", "key": "k-prom", "metrics": True},
    {"name": "boss", "key": "k-boss", "admin": True},
]


def page(server, key: str | None = None) -> str:
    answer = server.http.get("/metrics", headers=bearer(key) if key else {})
    assert answer.status_code == 200
    return answer.text


def names(text: str) -> set[str]:
    """The keys whose series a page has."""
    return set(re.findall(r'key="([^"]+)"', text))


def samples(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def ask_all(server, *keys: str) -> None:
    for key in keys:
        poll(lambda key=key: server.http.post(CHAT, json=BODY, headers=bearer(key)).status_code == 200, 60)


@pytest.fixture
def key_file(tmp_path) -> dict:
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": KEYS}))
    return {"api_key_file": str(tmp_path / "keys.yaml"), "key_usage_file": str(tmp_path / "usage.sqlite")}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"data_parallel_size": 2},
        pytest.param({"api_server_count": 2}, marks=pytest.mark.slow),
        {"api_key": ["k-plain"], "admin_api_key": ["k-admin"]},
    ],
)
def test_a_key_of_several_reads_its_own_series_only(model_folder, key_file, more):
    with running_server(model_folder, **key_file, **more) as server:
        ask_all(server, "k-alice", "k-bob", "k-boss", *more.get("api_key", []))
        whole = {"alice", "bob", "boss"} | ({"key-1"} if "api_key" in more else set())
        for key in ("k-boss", "k-prom", *more.get("admin_api_key", [])):
            poll(lambda key=key: names(page(server, key)) == whole)
            assert "quire:num_requests_running" in page(server, key)
        for name in ("alice", "bob"):
            own = samples(page(server, f"k-{name}"))
            assert own and all(f'key="{name}"' in line for line in own)
            assert set(own) <= set(samples(page(server, "k-prom")))
        assert names(page(server, more["api_key"][0])) == {"key-1"} if "api_key" in more else True
        assert server.http.get("/metrics").status_code == 401


@pytest.mark.slow
def test_the_only_key_of_clients_reads_all_but_the_administrators(model_folder):
    with running_server(model_folder, api_key=["k-one"], admin_api_key=["k-admin"]) as server:
        ask_all(server, "k-one", "k-admin")
        poll(lambda: names(page(server, "k-admin")) == {"key-1", "admin"})
        assert names(page(server, "k-one")) == {"key-1"} and "quire:num_requests_running" in page(server, "k-one")


@pytest.mark.slow
def test_clients_without_a_key_next_to_an_administrators(model_folder):
    with running_server(model_folder, admin_api_key=["k-admin"]) as server:
        ask_all(server, "k-admin")
        poll(lambda: names(page(server, "k-admin")) == {"admin"})
        assert not names(page(server)) and "quire:num_requests_running" in page(server)


def test_without_keys_everything_is_public(server):
    everything = page(server)
    assert {"quire:num_requests_running", "vllm:num_requests_running", "process_cpu_seconds_total"} <= {
        re.split("[{ ]", line)[0] for line in samples(everything)
    }
