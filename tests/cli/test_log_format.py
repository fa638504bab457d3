"""The log as JSON, by a real server, and the warning of a slow step."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time

import httpx
import pytest

from quire.configs.log_format import formatter
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.engine.harness import Engine, fake_config


@pytest.mark.slow
def test_every_line_of_every_process_is_json(model_folder, tmp_path):
    address = tmp_path / "address"
    command = [sys.executable, "-m", "quire", "serve", model_folder, "--port", "0", "--log-format", "json"]
    command += ["--distributed-executor-backend", BACKEND, "--address-file", str(address)]
    environment = os.environ | {"FAKE_EXECUTOR": "step_delay=0.02", "QUIRE_SLOW_STEP_THRESHOLD": "0.01"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        url = _ready(address)
        httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers={"x-request-id": "abc"})
    finally:
        server.terminate()
        _, text = server.communicate(timeout=30)
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"server", "engine"} <= {line["process"] for line in lines}
    access = next(line for line in lines if line["logger"] == "quire.access" and line["request_id"] == "abc")
    assert (access["path"], access["status"], access["key"], access["level"]) == ("/v1/completions", 200, None, "info")
    slow = [line["message"] for line in lines if "a step took" in line["message"]]
    assert len(slow) == 1 and "1 requests with" in slow[0] and "KV cache" in slow[0]  # at most once a minute


def _ready(address) -> str:
    for _ in range(300):
        if address.exists() and (text := address.read_text().strip()):
            try:
                if httpx.get(f"http://{text}/ready", trust_env=False).status_code == 200:
                    return f"http://{text}"
            except httpx.TransportError:
                pass
        time.sleep(0.1)
    raise AssertionError("the server is not ready")


def test_an_exception_is_one_line():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "failed %s", ("x",), sys.exc_info())
    line = formatter("json", "engine").format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "failed x" and "ValueError: two" in json.loads(line)["exception"]


def test_no_warning_below_the_threshold(caplog):
    engine = Engine(fake_config(max_model_len="64", num_gpu_blocks_override=20))
    engine.add("a", [1, 2], max_tokens=3)
    engine.run()
    assert not [record for record in caplog.records if "a step took" in record.message]
