"""Parses `--kv-events-config`, which is vLLM's JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_PORT = re.compile(r"(tcp://.*:)(\d+)")
_CHOICES = {"publisher": ("zmq", "null"), "event_format": ("array", "map")}
_NUMBERS = ("buffer_steps", "hwm", "max_queue_size")
_KEYS = (
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    *_NUMBERS,
    "topic",
    "event_format",
)


@dataclass(frozen=True, slots=True)
class KVEventsSettings:
    """The destination of KV events. `event_format` is how an event is written: as a map with names, as vLLM's newest
    releases do, or as an array, as vLLM did until 0.23 and as AIBrix's indexer and older ones of llm-d expect.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that can be sent again
    hwm: int = 100_000  # batches that wait for a slow subscriber
    max_queue_size: int = 100_000  # batches that wait for the publisher
    topic: str = ""
    event_format: str = "map"

    def for_engine(self, index: int) -> KVEventsSettings:
        """Return the settings of one of several engines: its ports are `index` higher, its other addresses end
        in it.
        """
        if not index:
            return self
        replay = self.replay_endpoint and _offset(self.replay_endpoint, index)
        values = {name: getattr(self, name) for name in (*_NUMBERS, "topic", "event_format")}
        return KVEventsSettings(_offset(self.endpoint, index), replay, **values)


def read_kv_events(text: str) -> KVEventsSettings | None:
    """Read the JSON object `text`; None: no events. Raises ValueError naming the key and its valid values."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"must be a JSON object, got {text}")
    if unknown := sorted(values.keys() - set(_KEYS)):
        raise ValueError(f"unknown key {', '.join(unknown)}; the keys are {', '.join(_KEYS)}")
    values = {key: value for key, value in values.items() if value is not None}
    enabled = values.pop("enable_kv_cache_events", False)
    if not isinstance(enabled, bool):
        raise ValueError(f"enable_kv_cache_events is {json.dumps(enabled)}, but must be true or false")
    for key, value in values.items():
        _check(key, value)
    publisher = values.pop("publisher", "zmq" if enabled else "null")
    if enabled and publisher == "null":
        raise ValueError("publisher is null, but enable_kv_cache_events is true: set publisher to zmq")
    return KVEventsSettings(**values) if enabled else None


def _check(key: str, value: Any) -> None:
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ValueError(f"{key} is {json.dumps(value)}, but must be one of {', '.join(_CHOICES[key])}")
    if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10_000_000):
        raise ValueError(f"{key} is {json.dumps(value)}, but must be a whole number from 1 to 10000000")
    if key in ("endpoint", "replay_endpoint", "topic") and not isinstance(value, str):
        raise ValueError(f"{key} is {json.dumps(value)}, but must be a string")
    if key in ("endpoint", "replay_endpoint") and not (
        _PORT.fullmatch(value) or (value.startswith(("ipc://", "inproc://")) and not value.endswith("/"))
    ):
        raise ValueError(f"{key} is {json.dumps(value)}, but must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")


def _offset(endpoint: str, index: int) -> str:
    if match := _PORT.fullmatch(endpoint):
        if match[2] == "0":
            return endpoint  # the system chooses each engine's port
        return f"{match[1]}{int(match[2]) + index}"
    return f"{endpoint}_dp{index}"
