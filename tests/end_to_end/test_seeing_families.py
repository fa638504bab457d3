"""Language models that transformers has only beside an encoder, as `test_families.py` and `test_family_ranks.py` have
the others.
"""

from __future__ import annotations

import pytest
import torch

from quire.worker.models.registry import read_model_spec
from tests.end_to_end import test_families
from tests.end_to_end.test_families import prompts  # noqa: F401
from tests.helpers.models.families import SEEING, build_family
from tests.worker.models.test_family_ranks import Pipeline, over_ranks
from tests.worker.test_tensor_parallel import build, logits_of


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEING)
def test_tokens_and_logprobs_equal_transformers(name, prompts, tmp_path):  # noqa: F811
    test_families.test_tokens_and_logprobs_equal_transformers(name, prompts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SEEING, "zamba2"])
def test_two_ranks_agree_with_one(name, tmp_path):
    folder = build_family(name, tmp_path)
    expected, has_experts = logits_of(build(folder)), any(layer.moe for layer in read_model_spec(folder).layers)
    for logits in over_ranks(folder, has_experts):
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits_of(Pipeline(folder)), expected, atol=1e-5, rtol=0)
