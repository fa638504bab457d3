"""`quire run-batch` as a user runs it, on the embedded model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "quire", "run-batch"]


def write(path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def request(custom_id: str, url: str = "/v1/chat/completions", **body) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_an_interrupted_run_goes_on_and_answers_in_the_order_of_the_input(tmp_path):
    lines = [
        request(f"{i}", messages=[{"role": "user", "content": f"What is {i % 10} plus 3?"}], temperature=0)
        for i in range(150)
    ]
    lines.insert(7, request("text", "/v1/completions", prompt="Hello", max_tokens=2))
    lines.insert(9, request("bad", messages=[]))
    write(tmp_path / "in.jsonl", lines)
    command = [*COMMAND, "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--num-threads", "1"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    state = tmp_path / "out.jsonl.batch"
    while first.poll() is None and not (state / "batches.sqlite").exists():
        time.sleep(0.05)
    time.sleep(2)
    first.send_signal(signal.SIGINT)
    _, log = first.communicate(timeout=60)
    assert first.returncode == 0 or (first.returncode == 130 and "goes on from here" in log)
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "152 requests, 1 failed" in result.stdout
    # a phase that is over before its first line is left out
    assert re.search(r"^(starting|loading|warming up)", log + result.stderr, re.MULTILINE)
    assert "requests: 100% 152/152" in log + result.stderr  # the first run's if it had answered all of them
    answers = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "0 + 3 = 3"
    assert answers[9]["response"]["status_code"] == 400
    assert set(os.listdir(tmp_path)) == {"in.jsonl", "out.jsonl"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("{\n", "line 1"),
        (json.dumps(request("a", "/v1/none")) + "\n" + json.dumps(request("a", "/v1/none")), "used by an earlier line"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(tmp_path, text, message):
    (tmp_path / "in.jsonl").write_text(text)
    command = [*COMMAND, "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr
