"""The soak of benchmarks/soak_memory.py, short, and the memory of the embedded model's server at start."""

from __future__ import annotations

import pytest

from benchmarks import soak_memory
from benchmarks.server import Server

FLAGS = ["--device", "cpu", "--num-threads", "1", "--max-model-len", "1024", "--log-level", "info"]


def test_slope():
    assert soak_memory.slope([(0, 5), (1, 7), (2, 9)]) == pytest.approx(2)
    assert soak_memory.slope([(0, 5), (1, 7), (2, 5)]) == 0


def test_every_request_differs():
    for kind in soak_memory.KINDS:
        bodies = [str(soak_memory.request_of(kind, number)) for number in range(300)]
        assert len(set(bodies)) == 300


@pytest.mark.slow
def test_the_embedded_models_server_is_small_and_stays_so(checkpoint):
    server = Server(FLAGS)
    try:
        server.wait_ready()
        (engine,) = [size for name, size in server.resident().items() if name.startswith("quire-engine")]
        assert engine < 300
        for kind in ("conversations", "schemas"):
            grown = soak_memory.soak(server, kind, 60)
            assert all(size < 500 for size, _ in grown.values()), grown
    finally:
        server.end()
