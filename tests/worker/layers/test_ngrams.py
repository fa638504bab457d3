"""The rows of n-grams are those of transformers' formula, whatever the steps, and end at separators of texts."""

from __future__ import annotations

import pytest
import torch

from quire.worker.layers.states.ngrams import ngram_rows
from quire.worker.models.registry import parse_model_spec
from tests.helpers.models.families import FAMILIES, family_config
from tests.worker.layers.test_states import state_step

NUMBER, EOS = 40, 2


def theirs(place: int):
    """transformers' module, its spec here, and their configuration."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

    config = family_config("qwen4_exp")
    layer = config.ple_layer_ids[place] - 1
    module = theirs.Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, layer, place)
    return module, parse_model_spec(config.to_dict()).layers[layer].ngrams


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("steps", [[NUMBER], [1] * NUMBER, [3, 1, 1, 30, 5], [1, 39]])
def test_equal_those_of_transformers(place, steps):
    module, ngrams = theirs(place)
    assert list(ngrams.rows) == module.head_vocab_sizes and ngrams.total == len(module.ngram_embedding.weight)
    generator = torch.Generator().manual_seed(place)
    ids = torch.randint(3, FAMILIES["qwen4_exp"][1]["vocab_size"], (NUMBER,), generator=generator)
    ids[[7, 8, 20, 22]] = EOS
    module.ngram_embedding.weight = torch.nn.Parameter(torch.arange(float(ngrams.total))[:, None])  # the row's number
    expected = module(ids[None], None)[0].long()
    pages, got, done = torch.full((2, ngrams.size - 1), 77.0), [], 0
    for count in steps:
        step = state_step([1], [1], [done], [count])
        got.append(ngram_rows(ids[done : done + count], ngrams, pages, step))
        done += count
    assert torch.cat(got).tolist() == expected.tolist()
