"""The flags of several machines: which engines run where, and numbers that do not fit."""

from __future__ import annotations

import pytest

from quire.configs.config import Config


def config_of(flags: str) -> Config:
    words = iter(flags.removeprefix("--").split(" --"))
    settings = {name.replace("-", "_"): value or True for name, _, value in (word.partition(" ") for word in words)}
    return Config.from_flat(**{key: int(value) if str(value).isdigit() else value for key, value in settings.items()})


@pytest.mark.parametrize(
    ("flags", "engines", "spans"),
    [
        ("--tensor-parallel-size 2", [0], False),
        ("--tensor-parallel-size 2 --nnodes 2 --master-addr 10.0.0.1", [0], True),
        ("--pipeline-parallel-size 4 --nnodes 4 --node-rank 3 --headless", [0], True),
        ("--data-parallel-size 2", [0, 1], False),
        ("--data-parallel-size 4 --nnodes 2 --node-rank 1 --headless", [2, 3], True),
        ("--data-parallel-size 4 --data-parallel-size-local 1", [0], True),
        ("--data-parallel-size 4 --data-parallel-size-local 0", [], True),
        (
            "--data-parallel-size 4 --data-parallel-size-local 4 --data-parallel-start-rank 0 --headless",
            [0, 1, 2, 3],
            False,
        ),
        ("--data-parallel-size 4 --data-parallel-start-rank 1 --headless", [1, 2, 3], True),
        ("--data-parallel-size 4 --data-parallel-rank 3", [3], False),
        ("--data-parallel-size 4 --data-parallel-size-local 2 --data-parallel-hybrid-lb", [0, 1], False),
    ],
)
def test_the_engines_of_a_machine(flags, engines, spans):
    config = config_of(flags)
    config.parallel.check_nodes(config.server.headless)
    assert list(config.parallel.local_engines) == engines
    assert config.parallel.spans_machines == spans


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nnodes 3 --tensor-parallel-size 2", "--nnodes 3 does not divide the number of ranks, 2"),
        ("--headless", "--headless needs --node-rank 1"),
        ("--nnodes 2 --node-rank 1 --tensor-parallel-size 2", "--node-rank 1 needs --headless"),
        ("--nnodes 2 --node-rank 2 --headless", "--node-rank 2 must be less than --nnodes 2"),
        ("--nnodes 2 --data-parallel-size 3", "--nnodes 2 does not divide --data-parallel-size 3"),
        ("--nnodes 2 --node-rank 1 --data-parallel-size 2", "engine 1 needs --headless"),
        ("--headless --data-parallel-size 2 --data-parallel-size-local 1", "needs --data-parallel-start-rank 1"),
        (
            "--headless --data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-start-rank 2",
            "must be less than --data-parallel-size 2",
        ),
        ("--data-parallel-size-local 2", "--data-parallel-size-local 2 needs --data-parallel-size"),
        ("--data-parallel-size 2 --data-parallel-rank 2", "engine 2 of this machine"),
        ("--nnodes 2 --tensor-parallel-size 2 --distributed-executor-backend ray", "backend mp, not ray"),
    ],
)
def test_wrong_numbers_are_named(flags, message):
    config = config_of(flags)
    with pytest.raises(ValueError, match=message):
        config.parallel.check_nodes(config.server.headless)
