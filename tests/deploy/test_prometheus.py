"""deploy/prometheus with Debian's Prometheus: it scrapes a server, evaluates the rules, and an alert fires."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from tests.helpers.server.running import poll, running_server
from tests.server.test_launch import free_port

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
KEYS = "keys: [{name: team, key: team-key, tokens_per_day: 1}, {name: watch, key: watch-key}]"


def configuration(folder: Path, port: int) -> Path:
    """The files of deploy/, for a server on this machine with keys, looking every second."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    job["authorization"] = {"credentials_file": str(folder / "key")}
    (folder / "key").write_text("watch-key")
    shutil.copy(FOLDER / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return folder / "prometheus.yml"


def test_it_scrapes_evaluates_and_alerts(model_folder, tmp_path):
    (tmp_path / "keys.yaml").write_text(KEYS)
    settings = {"api_key_file": str(tmp_path / "keys.yaml"), "key_usage_file": str(tmp_path / "usage")}
    port = free_port()
    with running_server(model_folder, **settings) as server:
        server.wait_ready()
        command = [PROMETHEUS, f"--config.file={configuration(tmp_path, server.listener.getsockname()[1])}"]
        command += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as api:

                def get(path: str, **query: str):
                    try:
                        answer = api.get(path, params=query)
                        return answer.json()["data"] if answer.status_code == 200 else None  # it still starts
                    except httpx.TransportError:
                        assert process.poll() is None, (tmp_path / "log").read_text()
                        return None

                up = poll(lambda: (get("/query", query="up") or {}).get("result"), 30)
                poll(lambda: get("/query", query="up")["result"][0]["value"][1] == "1", 30)
                assert up[0]["metric"]["job"] == "quire"

                def ask() -> bool:
                    """Refused, whenever the last one was, and counted. Whether Prometheus has told of it."""
                    body = {"prompt": "x", "max_tokens": 1}
                    server.http.post("/v1/completions", json=body, headers={"x-api-key": "team-key"})
                    alerts = get("/alerts")["alerts"]
                    return "QuireBudgetIsSpent" in {one["labels"]["alertname"] for one in alerts}

                poll(ask, 30)
                (group,) = get("/rules")["groups"]
                assert {rule["health"] for rule in group["rules"]} == {"ok"}
        finally:
            process.kill()
            process.wait()
