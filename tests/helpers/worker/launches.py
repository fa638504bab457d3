"""Counts the launches of a step without a GPU: the code of the GPU path runs on the CPU with Triton kernels that do
nothing, and every launch or copy is recorded.

python -m tests.helpers.worker.launches      prints a table of some models and batches
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

os.environ.setdefault("TRITON_INTERPRET", "1")
from triton.runtime import interpreter

from quire.configs.config import Config
from quire.worker import memory
from quire.worker.batch.request_table import RequestTable
from quire.worker.cache import allocation as kv_cache
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cuda.install import TritonOps
from quire.worker.cuda.triton_backend import TritonPagedBackend
from quire.worker.layers import linear, moe, onednn
from quire.worker.limits import resolve_limits
from quire.worker.messages import SamplingParams, StepInput
from quire.worker.model_runner import ModelRunner
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.weights.loader import load_weights
from tests.helpers.models.checkpoints import config_of
from tests.helpers.worker.steps import Script

PAGE = 4
# operations that allocate memory without a kernel
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


def _shares_memory(result: torch.Tensor | list[torch.Tensor], of: torch.Tensor) -> bool:
    """Return whether the result shares the memory of an argument: `to` and `reshape` may copy."""
    first = result if isinstance(result, torch.Tensor) else result[0]
    return first.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


class Launches(TorchDispatchMode):
    """Counts launches outside and inside recorded passes, by name. `empty` returns zeros, because no Triton kernel
    writes to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside, self.inside, self.replaying, self.silent = Counter(), Counter(), False, False

    def add(self, name: str) -> None:
        if not self.silent:
            (self.inside if self.replaying else self.outside)[name] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func.__name__.partition(".")[0]
        if name in FREE:
            result.zero_()
        elif not (func.is_view and _shares_memory(result, args[0])):
            self.add(name)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        def launch(executor, *args, **kwargs):
            self.add(executor.fn.__name__)

        # a GPU multiplies in 16 bits, whatever this CPU does
        multiplies = mock.patch.object(linear, "multiplies", lambda dtype: True)
        plain = mock.patch.object(onednn, "_takes_arranged", lambda: False)
        with mock.patch.object(interpreter.GridExecutor, "__call__", launch), multiplies, plain, self:
            yield

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a recorder for `ModelRunner.use_graphs`, which replays by calling the function again."""
        function()

        def replay() -> None:
            self.add("graph")
            self.replaying = True
            function()
            self.replaying = False

        return replay


class Platform(CpuPlatform):
    """Counts each copy as a launch, as on a GPU."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches, self.own_ops = launches, TritonOps()

    ops = property(lambda self: self.own_ops)

    def to_device(self, array):
        return self._copied("copy to the device", lambda: CpuPlatform.to_device(self, array))

    def to_host(self, tensor):
        return self._copied("copy to the host", lambda: CpuPlatform.to_host(self, tensor))

    def _copied(self, name: str, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._launches.add(name)
        before, self._launches.silent = self._launches.silent, True
        try:
            return copy()
        finally:
            self._launches.silent = before


def count(name: str, batch: int, layers: int, sampling: SamplingParams) -> Launches:
    """Return the launches of a decode step of `batch` requests, some of which get a new block, through a recorded pass
    of a model of the checkpoint `name` with `layers` layers.
    """
    launches = Launches()
    with tempfile.TemporaryDirectory() as folder, launches.counting():
        config_of(name, num_hidden_layers=layers).save_pretrained(folder)
        runner = make_runner(folder, batch, Platform(launches))
        runner.use_graphs(40, launches.record)
        script, rows = Script(PAGE), range(batch)
        for row in rows:
            script.add(row, [5 + i for i in range(1 + row % PAGE)], sampling)
        while runner.work_idle():
            pass
        step = script.step({row: len(script.rows[row].prompt) for row in rows})
        for _ in range(2):  # the second decode step: tables of new requests are on the device
            script.receive(step, runner.execute(in_groups(step, len(runner.table.groups))).result())
            launches.outside.clear()
            launches.inside.clear()
            step = script.step(dict.fromkeys(rows, 1))
        runner.execute(in_groups(step, len(runner.table.groups)))
    return launches


def in_groups(step: StepInput, num_groups: int) -> StepInput:
    """Return `step`, which has the blocks of one cache group, with the same blocks in each of several."""
    replace = msgspec.structs.replace
    new = [replace(one, block_ids=one.block_ids * num_groups) for one in step.new]
    return replace(step, new=new, new_blocks=[blocks * num_groups for blocks in step.new_blocks])


def make_runner(folder: str, batch: int, platform: Platform) -> ModelRunner:
    """Return a runner of the model with zero weights in bfloat16, as on a GPU except for the device."""
    spec = read_model_spec(folder)
    config = Config.from_flat(
        model=folder, device="cpu", max_model_len="40", block_size=PAGE, max_num_batched_tokens=4 * batch
    )
    limits = resolve_limits(config, spec, CpuPlatform())
    with mock.patch.object(moe, "ListedExperts", lambda *args: moe.StackedExperts(*args[:3])):
        model = build_model(spec, torch.bfloat16, torch.device("cpu"), 40, ops=platform.ops)
    load_weights(model, spec, folder, "dummy")
    model.use(platform.ops)
    model.finalize()
    plan = memory.cache_plan(config, spec, limits)
    kv_cache.allocate(kv_cache.attention_layers(model), plan, 16 * batch, PAGE, limits.kv, platform)
    table = RequestTable(batch, 40, PAGE, spec.vocab_size, platform, plan.groups)
    return ModelRunner(model, table, TritonPagedBackend(), platform, 4 * batch)


def per_layer(name: str, batch: int, sampling: SamplingParams) -> tuple[Launches, Counter]:
    """Return (launches of a step of three layers, launches that a fourth layer adds)."""
    three, four = (count(name, batch, layers, sampling) for layers in (3, 4))
    return three, four.inside - three.inside


if __name__ == "__main__":
    mixed = SamplingParams(temperature=0.7, top_p=0.9, seed=1)
    for name in ("llama3", "qwen3", "qwen3-moe", "gpt-oss"):
        for batch in (1, 8, 64):
            launches, layer = per_layer(name, batch, mixed)
            print(f"{name}, batch {batch}: {launches.outside.total()} outside, {layer.total()} per layer")
            print("   outside:", dict(launches.outside), "\n   layer:", dict(layer))
