"""deploy/: alert rules and dashboard ask for metrics that a server has; promtool agrees, where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helpers.server.running import running_server

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMTOOL = shutil.which("promtool")


def expressions() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((DEPLOY / "grafana/quire.json").read_text())["panels"]
    return [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.fixture(scope="module")
def page(model_folder, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.yaml").write_text("keys: [{name: team, key: k, tokens_per_day: 1, metrics: true}]")
    settings = {"api_key_file": str(folder / "keys.yaml"), "key_usage_file": str(folder / "usage")}
    with running_server(model_folder, **settings) as server:
        server.wait_ready()
        statuses = [
            server.http.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers={"x-api-key": "k"}
            ).status_code
            for _ in range(2)
        ]
        assert statuses == [200, 429]
        return server.http.get("/metrics", headers={"x-api-key": "k"}).text


def test_every_metric_that_is_asked_for_exists(page):
    names = {name for text in expressions() for name in re.findall(r"quire:\w+|http_requests_total", text)}
    assert len(names) > 12
    missing = [name for name in names if f"\n{name}{{" not in page]
    assert not missing


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_rules_and_metrics(page):
    config = [PROMTOOL, "check", "config", str(DEPLOY / "prometheus/prometheus.yml")]
    done = subprocess.run(config, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True, timeout=30)
    # names with a colon, and a histogram that ends with _total, are vLLM's, for which dashboards exist
    known = r"should not contain ':'$|iteration_tokens_total non-counter metrics should not have"
    found = [line for line in (done.stdout + done.stderr).splitlines() if line and not re.search(known, line)]
    assert done.returncode in (0, 3) and not found, found
