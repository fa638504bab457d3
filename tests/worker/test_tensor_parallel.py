"""A model over several ranks gives the same result as on one rank."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp

from quire.worker.cpu import build as native_build
from quire.worker.cpu import native
from quire.worker.cpu.device import CpuPlatform
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.parallel import Group, init_distributed, shutdown_distributed, tp, use_groups
from quire.worker.weights.loader import load_weights
from tests.helpers.worker.dense_attention import PagedRunner
from tests.helpers.worker.ranks import run_ranks, thread_groups

CPU = torch.device("cpu")
TEXT = list(range(4, 90))


def build(folder: str, load_format: str = "auto", dtype: torch.dtype = torch.float32, **changes):
    spec = read_model_spec(folder)
    spec = replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))
    model = build_model(spec, dtype, CPU, ops=CpuPlatform().ops)
    load_weights(model, spec, folder, load_format, seed=3)
    return model


def logits_of(model) -> torch.Tensor:
    runner = PagedRunner(model, 1, 128)
    first = runner.step({0: TEXT[:-2]})[0]
    hidden = torch.cat([first, *(runner.step({0: [token]})[0] for token in TEXT[-2:])])
    with torch.inference_mode():
        return model.logits(hidden)


def build_ranks(size: int, folder: str, **options) -> list:
    models = []
    for group in thread_groups(size):
        with use_groups(tp=group):
            models.append(build(folder, **options))
    return models


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-bias", 2),
        ("llama-tied", 2),
        ("mistral", 4),
        ("qwen2", 4),
        ("qwen3", 2),
        ("qwen3", 4),
        ("deepseek-v3", 2),
    ],
)
def test_ranks_agree_with_one(checkpoint, name, size):
    folder = checkpoint(name)  # two KV heads: over four ranks each is held twice
    expected = logits_of(build(folder))
    models = build_ranks(size, folder)
    assert models[0].model.layers["0"].mlp.down_proj.weight.shape == (64, 160 // size)
    for logits in run_ranks(lambda rank: logits_of(models[rank]), size):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("vocab_size", [509, 511])
def test_vocabulary_that_the_ranks_do_not_divide(checkpoint, vocab_size):
    folder = checkpoint("qwen2", vocab_size=vocab_size)
    expected = logits_of(build(folder))
    models = build_ranks(4, folder)
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 4):
        assert logits.shape == (len(TEXT), vocab_size)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_dummy_weights_agree_over_ranks(checkpoint):
    folder = checkpoint("llama-bias")
    expected = logits_of(build(folder, load_format="dummy"))
    models = build_ranks(2, folder, load_format="dummy")
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(
    native_build.cpu_level() is None or native_build.compiler() is None, reason="no native kernels here"
)
@pytest.mark.parametrize("name", ["llama-bias", "llama-tied"])
def test_ranks_with_repacked_weights(checkpoint, monkeypatch, name):
    folder = checkpoint(name)
    expected = logits_of(build(folder))
    loaded = native.Kernels()
    assert loaded.load(background=False), loaded.status
    monkeypatch.setattr(native.KERNELS, "lib", loaded.lib)
    rounded = logits_of(build(folder, dtype=torch.bfloat16))
    models = build_ranks(2, folder, dtype=torch.bfloat16)
    assert models[1].lm_head.weight is None
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        # no worse than one rank in bfloat16
        assert (logits - expected).abs().mean() < 1.3 * (rounded - expected).abs().mean()


class Rank(Group):
    def __init__(self, size: int):
        self.size = size


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "num_attention_heads 4 cannot be split over tensor_parallel_size 3; sizes that divide it: 1, 2, 4"),
        (
            4,
            {"num_heads": 12, "num_kv_heads": 3, "head_dim": 16},
            "num_key_value_heads 3 cannot be split over tensor_parallel_size 4",
        ),
        (
            2,
            {"num_heads": 6, "num_kv_heads": 3, "head_dim": 16},
            "num_key_value_heads 3 cannot be split over tensor_parallel_size 2",
        ),
        (
            4,
            {"intermediate_size": 162},
            "intermediate_size 162 cannot be split over tensor_parallel_size 4; sizes that divide it: 1, 2, 3, 6",
        ),
    ],
)
def test_sizes_that_do_not_divide(checkpoint, size, changes, message):
    with use_groups(tp=Rank(size)), pytest.raises(ValueError, match=message):
        build(checkpoint("qwen2"), **changes)


def test_init_distributed_checks_the_sizes():
    with pytest.raises(
        ValueError, match="tensor_parallel_size 2 x pipeline_parallel_size 2 is not the number of processes, 3"
    ):
        init_distributed(0, 3, "tcp://127.0.0.1:1", tp_size=2, pp_size=2)
    init_distributed(0, 1, "unused", tp_size=1)
    assert tp().size == 1


def _process(rank: int, port: int, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    init_distributed(rank, 2, f"tcp://127.0.0.1:{port}", tp_size=2)
    try:
        gathered = tp().all_gather(torch.full((2, 3), float(rank)), dim=0)
        sent = tp().broadcast(torch.full((2,), 10.0 + rank), src=1)
        torch.save((tp().rank, logits_of(build(folder)), gathered, sent), f"{out}/{rank}.pt")
    finally:
        shutdown_distributed()


@pytest.mark.slow
def test_two_processes_over_gloo(checkpoint, tmp_path):
    folder = checkpoint("qwen3")
    expected = logits_of(build(folder))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_process, (port, folder, str(tmp_path)), nprocs=2)
    for rank in range(2):
        group_rank, logits, gathered, sent = torch.load(tmp_path / f"{rank}.pt")
        assert group_rank == rank
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert gathered.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
        assert sent.tolist() == [11.0, 11.0]


def test_logits_are_gathered_in_the_models_type(checkpoint, monkeypatch):
    """Half the bytes of float32, with the same information. (The native CPU kernels compute and gather float32.)"""
    monkeypatch.setattr(native.KERNELS, "lib", None)
    folder, gathered = checkpoint("qwen3"), []
    models = []
    for group in thread_groups(2):
        gather = group.all_gather
        group.all_gather = lambda x, *args, gather=gather: (gathered.append(x.dtype), gather(x, *args))[1]
        with use_groups(tp=group):
            models.append(build(folder, dtype=torch.bfloat16))
    hidden = torch.randn(3, models[0].spec.hidden_size, dtype=torch.bfloat16)
    alone = build(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        want = alone.logits(hidden)
    logits = run_ranks(lambda rank: models[rank].logits(hidden).detach(), 2)
    assert set(gathered) == {torch.bfloat16} and logits[0].dtype == torch.float32
    for ranks in logits:
        torch.testing.assert_close(ranks, want, atol=1e-2, rtol=1e-2)
