"""Ray Serve in front of real servers: one answer, one stream, an error, more replicas while requests wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("RAY_SERVE_PYTHON", sys.executable)
SCRIPT = '''
import json, sys, threading, time, urllib.error, urllib.request
import ray
from ray import serve
from quire.server.ray_serve import app

ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
serve.start(http_options={"port": int(sys.argv[1])})
args = {"model": sys.argv[2], "max_num_seqs": 1, "max_replicas": 2, "target_num_requests_waiting": 2}
serve.run(app(args | {"ray_actor_options": {"num_cpus": 1}}))

def post(body, path="/v1/completions"):
    data = json.dumps(body).encode()
    url, headers = f"http://127.0.0.1:{sys.argv[1]}{path}", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
status, text = post(body)
whole = json.loads(text)["choices"][0]["text"]
events = post(body | {"stream": True})[1].splitlines()
pieces = [json.loads(one[6:])["choices"][0]["text"] for one in events if one.startswith("data: {")]
assert status == 200 and "".join(pieces) == whole and events[-2] == "data: [DONE]", (status, whole, events)
status, text = post(body | {"max_tokens": -1})
assert status == 400 and json.loads(text)["error"]["param"] == "max_tokens", (status, text)
print("ANSWERS", flush=True)

ended = threading.Event()
def load():
    while not ended.is_set():
        post(body | {"max_tokens": 1500})
for _ in range(8):
    threading.Thread(target=load, daemon=True).start()
for _ in range(240):
    if serve.status().applications["default"].deployments["quire"].replica_states.get("RUNNING") == 2:
        print("SCALED", flush=True)
        break
    time.sleep(1)
ended.set()
'''


def test_the_number_of_replicas_follows_what_waits():
    pytest.importorskip("aiohttp")
    try:
        from quire.server.ray_serve import replicas_for
    except ImportError as error:
        pytest.skip(str(error))
    assert replicas_for(1, {"a": 0.0}, 4) == 0  # Ray Serve keeps min_replicas
    assert replicas_for(2, {"a": 3.0, "b": 0.0}, 4) == 2
    assert replicas_for(2, {"a": 3.0, "b": 6.0}, 4) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_serve_runs_servers_and_adds_one_while_requests_wait():
    """RAY_SERVE_PYTHON names the Python of an environment with ray[serve] and quire."""
    found = subprocess.run([PYTHON, "-c", "import aiohttp, ray.serve"], check=False, capture_output=True)
    if found.returncode:
        pytest.skip("ray[serve] is not installed: RAY_SERVE_PYTHON names an environment with it")
    from tests.server.test_launch import free_port

    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_USAGE_STATS_ENABLED": "0"}
    # a loaded machine
    environment |= {"RAY_raylet_start_wait_time_s": "240", "RAY_agent_register_timeout_ms": "240000"}
    command = [PYTHON, "-c", SCRIPT, str(free_port()), "quire-tiny"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=500)
    assert "ANSWERS" in run.stdout and "SCALED" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]
