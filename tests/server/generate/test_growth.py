"""A server holds no more objects after many requests that all differ than after the first: its caches have bounds."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

import pytest

from benchmarks.soak_memory import KINDS, request_of
from quire.server.generate import structures as service
from tests.helpers.server.running import RunningServer, running_server
from tests.server.media.conftest import FAKE, write_seeing_model

NUM_WARM_UP = 60  # fill the caches
NUM_REQUESTS = 250
SLACK = 150  # asyncio keeps up to 100 cancelled timers
_CONTAINERS = (dict, list, set, OrderedDict, deque)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[RunningServer]:
    """A server of which every cache is full after a few dozen requests."""
    folder = write_seeing_model(tmp_path_factory.mktemp("seeing"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "CACHE_BYTES", 30_000)
        settings = {"max_model_len": "2048", "mm_processor_cache_gb": 0.0005}
        with running_server(folder, fake=FAKE, **settings) as running:
            running.wait_ready()
            running.state.responses.store.max_objects = 20
            yield running


def held() -> Counter[str]:
    """By type, how many objects this process has and how many entries they have, but those of deques with a bound.

    Dicts of plain texts and numbers are found by what holds them: the garbage collector does not list them.
    """
    gc.collect()
    objects = {id(one): one for one in gc.get_objects()}
    for one in list(objects.values()):
        objects.update((id(part), part) for part in gc.get_referents(one) if type(part) is dict)
    counts: Counter[str] = Counter()
    for one in objects.values():
        grows = type(one) in _CONTAINERS and not getattr(one, "maxlen", None)
        counts[type(one).__qualname__] += 1 + (len(one) if grows else 0)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_requests_leave_no_objects_behind(small, kind):
    def send(first: int, count: int) -> None:
        for number in range(first, first + count):
            path, body = request_of(kind, number)
            assert small.http.post(path, json=body).status_code == 200

    send(0, NUM_WARM_UP)
    before = held()
    send(NUM_WARM_UP, NUM_REQUESTS)
    grown = {name: count for name, count in (held() - before).items() if count >= SLACK}
    assert not grown
    if kind == "conversations":  # their database is no object of Python's
        assert small.state.responses.store.num_evicted >= NUM_REQUESTS
