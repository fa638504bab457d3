"""Every family gives the logits of one rank over two ranks that share each layer, that divide its experts, and that are
stages of a pipeline.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.worker.models.registry import read_model_spec
from quire.worker.parallel import use_groups
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS, build_checkpoint
from tests.helpers.models.families import FAMILIES, WITHOUT_VARIANTS, build_family
from tests.helpers.worker.ranks import run_ranks, thread_groups
from tests.worker.models.test_models import Stage
from tests.worker.test_tensor_parallel import build, logits_of


class Pipeline(nn.Module):
    """Two stages, one after the other."""

    def __init__(self, folder: str):
        super().__init__()
        stages = []
        for rank in range(2):
            with use_groups(pp=Stage(rank, 2)):
                stages.append(build(folder))
        self.stages, self.model = nn.ModuleList(stages), stages[1].model
        self.spec, self.dtype, self.logits = stages[0].spec, torch.float32, stages[1].logits

    def forward(self, input_ids, positions, attn):
        first, second = self.stages
        return second(input_ids, positions, attn, first(input_ids, positions, attn))


def over_ranks(folder: str, expert_parallel: bool) -> list[torch.Tensor]:
    """The logits of two ranks."""
    models = []
    for group in thread_groups(2):
        with use_groups(tp=group, ep=group if expert_parallel else None):
            models.append(build(folder))
    return run_ranks(lambda rank: logits_of(models[rank]), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITHOUT_VARIANTS, "deepseek_v4", *CHECKPOINTS, *MOE_CHECKPOINTS])
def test_two_ranks_agree_with_one(name, tmp_path):
    folder = (build_family if name in FAMILIES else build_checkpoint)(name, tmp_path)
    expected = logits_of(build(folder))
    ways = [False, True] if any(layer.moe for layer in read_model_spec(folder).layers) else [False]
    # a norm directly after a state scales the rounding of small values up
    atol = 1e-3 if read_model_spec(folder).has_states else 2e-4
    for expert_parallel in ways:
        for logits in over_ranks(folder, expert_parallel):
            torch.testing.assert_close(logits, expected, atol=atol, rtol=0)
    torch.testing.assert_close(logits_of(Pipeline(folder)), expected, atol=1e-5, rtol=0)
