"""vLLM's flags of engines on several machines."""

from __future__ import annotations

import pytest

from quire.configs.peers.reading import Given
from quire.configs.sources import resolve

EXTERNAL = Given("--data-parallel-external-lb")
RAY = Given("--data-parallel-backend", ("ray",))


def test_a_node_has_the_engine_of_its_number():
    flags = {"data_parallel_size": "2", "nnodes": "2", "node_rank": "1"}
    found = resolve(flags, environ={}, others=[EXTERNAL])
    assert found.values["data_parallel_rank"] == 1 and list(found.config().parallel.local_engines) == [1]
    assert resolve(flags | {"data_parallel_rank": "0"}, environ={}, others=[EXTERNAL]).values["data_parallel_rank"] == 0


@pytest.mark.parametrize("flags", [{"data_parallel_size": "2"}, {"data_parallel_size": "4", "nnodes": "2"}])
def test_without_a_number_it_is_refused(flags):
    with pytest.raises(ValueError, match="--data-parallel-external-lb needs --data-parallel-rank"):
        resolve(flags, environ={}, others=[EXTERNAL])


def test_ray_starts_no_engines_on_other_machines():
    elsewhere = {"data_parallel_size": "4", "data_parallel_size_local": "2"}
    with pytest.raises(ValueError, match=r"--data-parallel-backend ray: refused: .*--headless"):
        resolve(elsewhere, environ={}, others=[RAY])
    assert resolve({"data_parallel_size": "2"}, environ={}, others=[RAY]).warnings
    assert resolve(elsewhere, environ={}, others=[Given("--data-parallel-backend", ("mp",))]).warnings
