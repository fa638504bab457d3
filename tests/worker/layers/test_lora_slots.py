"""Adapters in slots, from which recorded steps read: by the Triton kernels (under the interpreter, compiled on a GPU),
by plain torch, and without waiting for the device.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire.worker.layers.lora import LinearLora, StepLora
from quire.worker.layers.lora_slots import LoraSlots, add_lora_slots
from quire.worker.lora.adapters import Adapters, LoraLimits
from tests.helpers.models.lora import make_adapter, use
from tests.worker.cpu.test_lora_kernels import random_weights
from tests.worker.cuda.test_no_sync import NoCopies, NoWaiting, family_runner, family_steps


def test_triton_products_of_slots_equal_torchs():
    """As a recorded step computes them: adapters in slots, one of them without matrices for the layer, more room than
    rows.
    """
    pytest.importorskip("triton")
    from quire.worker.cuda.kernels import triton_lora

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(3)
    layer, other = (SimpleNamespace(lora=LinearLora(StepLora(), 3, 3)) for _ in range(2))
    slots = LoraSlots([layer.lora, other.lora], 4, 40, 20, device)
    to_device = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
    for key, rank, of in (("a", 3, layer), ("b", 20, layer), ("c", 5, other)):
        weights = random_weights(rank, 50, (37, -20, 24), torch.float32, generator).to(device)
        assert slots.put(key, [(of, weights)], to_device)
    assert not slots.put("experts", [(SimpleNamespace(lora=LinearLora(StepLora())), None)], to_device)
    slots.drop("a")
    weights = random_weights(7, 50, (37, -20, 24), torch.float32, generator).to(device)
    assert slots.put("d", [(layer, weights)], to_device)
    x, out = (torch.randn(23, width, generator=generator).to(device) for width in (50, 81))
    for of_step in (
        [("d", [0, 2, 22], [1.0, 0.5, 2.0]), ("b", list(range(3, 22)), [1.0] * 19), ("c", [1], [1.0])],
        [("b", [5], [1.0])],
        [],
    ):
        slots.fill(23, of_step, to_device)
        expected, got = out.clone(), out.clone()
        add_lora_slots(x, expected, slots, layer.lora.slots)
        triton_lora.add_slots(x, got, slots, layer.lora.slots)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        changed = (got != out).any(1).nonzero()[:, 0].tolist()
        assert changed == sorted(row for key, rows, _ in of_step if key != "c" for row in rows)


@pytest.mark.parametrize("recorded", [False, True])
def test_adapters_do_not_wait(checkpoint, tmp_path, recorded):
    """After the first step, which brings them to the device."""
    folder = checkpoint("llama3")
    runner, (first, *others) = family_runner(folder), family_steps(1)
    runner.adapters = Adapters(runner.model, runner.platform, LoraLimits(8, 2, 2))
    runner.table.register(runner.adapters)
    for i, new in enumerate(first.new):
        new.adapters.append(use(make_adapter(tmp_path / str(i), folder, 4, seed=i), 1.0 + i))
    if recorded:
        runner.use_graphs(40, lambda function: function() or function)
        while runner.work_idle():
            pass
    fills, fill = [], runner.adapters.fill_slots
    runner.adapters.fill_slots = lambda size: fills.append(size) or fill(size)
    outputs = [runner.execute(first)]
    graphs = runner.forward._graphs if recorded else {}
    graphs |= {size: (lambda: None, hidden) for size, (_, hidden) in graphs.items()}  # the device runs them
    with NoWaiting(), NoCopies():
        outputs += [runner.execute(step) for step in others]
    assert [len(output.result().token_ids) for output in outputs] == [1, 2, 2]
    assert fills == ([2] if recorded else [])
