"""A server of the embedded model, for documents that ask one."""

from __future__ import annotations

import pytest

from quire.configs.sources import EMBEDDED_MODEL
from tests.helpers.server.running import running_server


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory):
    with running_server(
        str(EMBEDDED_MODEL),
        served_model_name=["quire-tiny"],
        batch_dir=str(tmp_path_factory.mktemp("batches")),
        slot_save_path=str(tmp_path_factory.mktemp("slots")),
        pooling="mean",
        distributed_executor_backend="uniproc",
        max_model_len="1024",
        kv_cache_memory_bytes=64 << 20,
    ) as running:
        running.wait_ready()
        yield running
