"""What is refused before a process starts."""

from __future__ import annotations

import pytest

from quire.configs.config import Config
from quire.server.errors import BadRequest
from quire.server.lora.adapters import Adapters
from quire.server.startup.checks import local_config

RAY = {"distributed_executor_backend": "ray", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    "machines",
    [{"nnodes": 2, "tensor_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_size_local": 1}],
)
def test_adapters_need_one_machine(model_folder, machines):
    config = Config.from_flat(enable_lora=True, **machines)
    with pytest.raises(ValueError, match="LoRA adapters need all ranks and engines on one machine"):
        local_config(config, str(model_folder), None, needs_weights=False)
    with pytest.raises(BadRequest, match="on one machine"):
        Adapters(Config.from_flat(**machines)).require_dynamic()


@pytest.mark.parametrize("settings", [{"data_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel_rank": 1}])
def test_adapters_of_engines_of_one_machine(model_folder, settings):
    config = Config.from_flat(enable_lora=True, **settings)
    assert local_config(config, str(model_folder), None, needs_weights=False).lora.enabled
    Adapters(config).require_dynamic()


def test_ray_may_place_all_ranks_on_one_machine():
    assert Config.from_flat(**RAY).parallel.spans_machines
    Adapters(Config.from_flat(enable_lora=True, **RAY)).require_dynamic()
