"""Limits of keys, on a clock that the test moves."""

from __future__ import annotations

import os
import sqlite3
import time

import pytest

from quire.server.errors import TooManyRequests
from quire.server.keys.key import Key, hashed, read_keys
from quire.server.keys.ledger import Ledger

NOON = time.time() // 86400 * 86400 + 43200.0


@pytest.fixture
def ledger(tmp_path):
    one = Ledger(str(tmp_path / "sub" / "usage.sqlite"), None)
    one.open()
    yield one
    one.close()


def refused(ledger: Ledger, key: Key, num_tokens: int, now: float) -> TooManyRequests:
    with pytest.raises(TooManyRequests) as caught:
        ledger.begin(key, num_tokens, now)
    return caught.value


def test_requests_of_a_minute_are_a_bucket(ledger):
    key = Key(name="a", key="k", requests_per_minute=3)
    headers = [ledger.begin(key, 5, NOON) for _ in range(3)]
    assert [one["x-ratelimit-remaining-requests"] for one in headers] == ["2", "1", "0"]
    assert headers[0]["x-ratelimit-limit-requests"] == "3" and headers[0]["x-ratelimit-reset-requests"] == "20s"
    assert not any("tokens" in name for name in headers[0])
    error = refused(ledger, key, 5, NOON + 5)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limit_exceeded", 15)
    assert error.limits["x-ratelimit-remaining-requests"] == "0"
    ledger.begin(key, 5, NOON + 20)
    refused(ledger, key, 5, NOON + 20)
    for _ in range(3):  # it holds no more than a minute's worth
        ledger.begin(key, 5, NOON + 3600)
    refused(ledger, key, 5, NOON + 3600)


def test_another_keys_use_does_not_count(ledger):
    ledger.begin(Key(name="a", key="k", requests_per_minute=1), 5, NOON)
    ledger.begin(Key(name="b", key="l", requests_per_minute=1), 5, NOON)


def test_output_tokens_are_a_debt(ledger):
    key = Key(name="a", key="k", tokens_per_minute=60)
    assert ledger.begin(key, 20, NOON)["x-ratelimit-remaining-tokens"] == "40"
    ledger.end(key, 100, now=NOON)
    error = refused(ledger, key, 10, NOON)
    assert error.retry_after == 70 and error.limits["x-ratelimit-reset-tokens"] == "2m0s"
    ledger.begin(key, 10, NOON + 70)
    # more than a minute's worth waits for a full bucket, and is not refused for ever
    assert refused(ledger, key, 1000, NOON + 80).retry_after == 50
    ledger.begin(key, 1000, NOON + 130)


def test_requests_in_flight(ledger):
    key = Key(name="a", key="k", max_concurrent_requests=2)
    ledger.begin(key, 5, NOON)
    ledger.begin(key, 5, NOON)
    assert refused(ledger, key, 5, NOON).code == "rate_limit_exceeded"
    ledger.end(key, 5, now=NOON)
    ledger.begin(key, 5, NOON)


def test_two_processes_share_the_limits_and_a_dead_one_holds_nothing(ledger):
    key = Key(name="a", key="k", max_concurrent_requests=1, requests_per_minute=3)
    db = sqlite3.connect(ledger._path)
    db.execute("INSERT INTO running VALUES ('a', ?, 1)", (2**22 + 1,))  # above every process id
    db.commit()
    ledger.begin(key, 5, NOON)
    ledger.end(key, 0, now=NOON)
    db.execute("INSERT INTO running VALUES ('a', ?, 1)", (os.getppid(),))
    db.commit()
    refused(ledger, key, 5, NOON)
    second = Ledger(ledger._path, None)
    second.open()
    assert refused(second, key, 5, NOON).limits["x-ratelimit-remaining-requests"] == "2"
    second.close()
    db.close()


def test_a_spent_day_survives_a_restart(ledger):
    key = Key(name="a", key="k", tokens_per_day=100)
    ledger.begin(key, 60, NOON)
    ledger.end(key, 50, now=NOON)
    ledger.close()
    again = Ledger(ledger._path, None)
    again.open()
    error = refused(again, key, 1, NOON + 10)
    assert (error.code, error.retry_after) == ("insufficient_quota", 43190)
    with pytest.raises(TooManyRequests):
        again.begin_in_background(key, 1, NOON + 10)
    again.begin(key, 1, NOON + 43200)
    again.close()
    ledger.open()


def test_a_refused_request_uses_nothing(ledger):
    key = Key(name="a", key="k", requests_per_minute=10, tokens_per_minute=60, max_concurrent_requests=5)
    ledger.begin(key, 60, NOON)
    for _ in range(5):
        assert refused(ledger, key, 60, NOON).limits["x-ratelimit-remaining-requests"] == "9"
    ledger.end(key, 0, now=NOON)
    ledger.begin(key, 60, NOON + 60)


# ---- the file


def write(tmp_path, text: str) -> str:
    (tmp_path / "keys.yaml").write_text(text)
    return str(tmp_path / "keys.yaml")


def test_plain_and_hashed_keys(tmp_path):
    second = f'{{name: b, key: "{hashed("other")}", weight: 2, models: [m], admin: true}}'
    a, b = read_keys(write(tmp_path, f"keys:\n- {{name: a, key: sécret}}\n- {second}"))
    assert a.digest == bytes.fromhex(hashed("sécret")[7:]) and b.digest == bytes.fromhex(hashed("other")[7:])
    assert (b.weight, b.models, b.admin, a.admin, a.is_limited) == (2, ["m"], True, False, False)


@pytest.mark.parametrize(
    "text,what",
    [
        ("keys:\n- {name: a}", "missing required field `key`"),
        ("keys:\n- {name: a, key: k, rpm: 3}", "unknown field `rpm`"),
        ("keys:\n- {name: a, key: k, requests_per_minute: 0}", ">= 1"),
        ("keys:\n- {name: a, key: k, weight: 0}", "> 0"),
        ("keys:\n- {name: a b, key: k}", "matching regex"),
        ("keys:\n- {name: a, key: k}\n- {name: a, key: l}", "'a' occurs twice"),
        ("keys:\n- {name: a, key: k}\n- {name: b, key: k}", "the same key"),
        ("keys:\n- {name: a, key: 'sha256:12'}", "64 hexadecimal digits"),
        ("keys: {", "not YAML"),
        ("- a", "Expected `object`"),
        ("", "Expected `object`"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, what):
    with pytest.raises(ValueError, match=r"--api-key-file .*keys.yaml") as caught:
        read_keys(write(tmp_path, text))
    assert what in str(caught.value)
