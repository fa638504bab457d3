"""What the platforms decide."""

from __future__ import annotations

import pytest

from worker import host
from worker.platform import _num_threads


@pytest.mark.parametrize("cores, ranks, frontends, expected", [(8, 1, 1, 8), (8, 2, 1, 4), (8, 3, 1, 2), (8, 1, 2, 6), (8, 2, 2, 3), (2, 4, 1, 1), (2, 1, 4, 1)])
def test_cores_are_divided_among_ranks_and_several_frontends(monkeypatch, cores, ranks, frontends, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(host, "num_cores", lambda: cores)
    threads, reason = _num_threads(None, ranks, frontends)
    assert threads == expected
    assert (f"shared by {ranks} ranks" in reason) == (ranks > 1) and (f"less {frontends} for the frontends" in reason) == (frontends > 1)


def test_threads_that_were_asked_for(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _num_threads(5, 2, 2) == (5, "as asked")
    assert _num_threads(None, 2, 2) == (3, "OMP_NUM_THREADS")
