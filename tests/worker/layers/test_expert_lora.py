"""LoRA adapters of experts within the native product of all experts, against the same adapters one expert after the
other.
"""

from __future__ import annotations

import pytest
import torch

from quire.worker.layers.activation import GATED
from quire.worker.layers.lora import LoraRows, StepLora
from quire.worker.layers.moe_lora import ExpertForm, ExpertsLora
from tests.worker.cpu.test_experts import EXPERTS, HIDDEN, check, kernels, pack, weights  # noqa: F401
from tests.worker.cpu.test_lora_kernels import random_weights

SIZE, FIRST = 64, 1


@pytest.mark.parametrize("kind", ["packed", "compact", "int8", "int4", "MXFP4"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_adapters_of_experts(kind, tokens):
    """Several adapters, scaled ones, rows with both and none, matrices for some experts only, experts of other ranks.
    Rows without an adapter keep their bits.
    """
    generator = torch.Generator().manual_seed(tokens)
    run, gate_up, down = pack(kind, *weights(size=SIZE), first=FIRST)
    here = range(FIRST, FIRST + EXPERTS)
    step = StepLora(num_tokens=tokens)
    lora = ExpertsLora(step, here, EXPERTS + 2, HIDDEN, SIZE, 0, SIZE, False)
    for key, rank, some in (("a", 4, here), ("b", 20, here[1:])):
        step.active[key] = []
        for i in some:
            for product, widths in ((lora.gate_up[i], (SIZE, SIZE)), (lora.down[i], (HIDDEN,))):
                matrices = random_weights(rank, product.in_features, widths, torch.bfloat16, generator)
                product.lora.weights[key] = matrices
                step.active[key].append((product, matrices))
    in_a = torch.arange(0, tokens, 3)
    in_b = torch.cat([torch.arange(min(1, tokens - 1), tokens, 3), in_a[3:6]]).sort().values
    scales = torch.rand(len(in_b), generator=generator) + 0.5
    groups = step.rows = [LoraRows("a", in_a, None, False, True), LoraRows("b", in_b, scales, False, True)]
    form = ExpertForm(
        lambda i, rows: rows.float() @ gate_up[i - FIRST].float().t(),
        GATED["silu"],
        lambda i, rows: rows.float() @ down[i - FIRST].float().t(),
        None,
    )
    x, routing = torch.randn(tokens, HIDDEN, generator=generator).bfloat16(), torch.rand(tokens, 2, generator=generator)
    ids = torch.rand(tokens, EXPERTS + 2, generator=generator).topk(2).indices
    got, base = run.run_adapted(x, routing, ids, groups, lora), run(x, routing, ids)
    want = lora.run(x, routing, ids, groups, form, False)
    adapted = torch.zeros(tokens, dtype=torch.bool)
    adapted[in_a] = adapted[in_b] = True
    assert torch.equal(got[~adapted], base[~adapted])
    check(got[adapted], want[adapted].float())
    assert not torch.equal(got[adapted], base[adapted])
