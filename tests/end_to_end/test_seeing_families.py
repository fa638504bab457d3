"""Language models that transformers has only beside an encoder, as `test_families.py` and `test_family_ranks.py` have
the others.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.worker.attention.distance_bias import DistanceBias
from quire.worker.models.registry import read_model_spec
from tests.end_to_end import test_families
from tests.end_to_end.test_families import assert_same_text, load_family, prompts  # noqa: F401
from tests.helpers.models.families import SEEING, VOCAB, build_family
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


@pytest.mark.slow
def test_a_head_of_inkling_with_fewer_rows_than_the_embeddings(prompts, tmp_path):  # noqa: F811
    """As the published files have it. transformers' head is padded, and the padding's logits are dropped."""
    settings = SEEING["inkling"][1]["text_config"] | {"unpadded_vocab_size": VOCAB - 8}
    folder = build_family("inkling", tmp_path, text_config=settings)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.llm.unembed.weight"] = tensors["model.llm.unembed.weight"][: VOCAB - 8].clone()
    model = load_family(folder)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    chosen = [[token % (VOCAB - 8) for token in prompt] for prompt in prompts]
    assert_same_text(model, tmp_path, chosen)


def test_keys_have_a_bias_up_to_the_extent_of_the_profiles():
    """Against a dense sum: keys at distances beyond the profiles, and ahead of the query, have none."""
    generator = torch.Generator().manual_seed(0)
    bias = DistanceBias(torch.randn(3, 2, 4, generator=generator), torch.randn(4, 5, generator=generator))
    distances = torch.tensor([[-1, 0, 4, 5], [2, 1, 0, -1], [9, 8, 7, 3]])
    found = bias.at(distances)
    for token, head, key in itertools.product(range(3), range(2), range(4)):
        distance = int(distances[token, key])
        expected = bias.states[token, head] @ bias.profiles[:, distance] if 0 <= distance < 5 else torch.tensor(0.0)
        torch.testing.assert_close(found[token, head, key], expected)
