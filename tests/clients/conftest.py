"""`quire serve` of the embedded model, as a client sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from quire.configs.sources import embedded_model
from tests.helpers.server.running import RunningServer, make_config, poll

NAME = "quire-tiny"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Of the API, with /v1."""
    os.environ.setdefault("OPENAI_API_KEY", "unused")  # some clients insist on one
    server = RunningServer(
        make_config(
            embedded_model(),
            distributed_executor_backend=None,
            served_model_name=[NAME],
            max_model_len="2048",
            kv_cache_memory_bytes=2**26,
        )
    )
    poll(lambda: hasattr(server, "launcher"))
    try:
        yield f"{server.wait_ready(60).url}/v1"
    finally:
        server.stop()
