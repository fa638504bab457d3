"""Which sizes of steps with prompts are recorded: as far as the host is slower than the device."""

from __future__ import annotations

import pytest

from quire.worker.batch.piece_sizes import piece_sizes
from quire.worker.models.registry import parse_model_spec

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}


def spec_of(sizes):
    raw = QWEN3 | sizes | {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960}
    return parse_model_spec(raw)


@pytest.mark.parametrize("sizes", [SMALL, LARGE])
@pytest.mark.parametrize("tp", [1, 4])
def test_padding_is_bounded(sizes, tp):
    found = piece_sizes(spec_of(sizes), 8192, tp)
    assert found == sorted(set(found)) and found[:4] == [16, 32, 64, 128]
    for num_tokens in range(1025, found[-1]):
        size = next(size for size in found if size >= num_tokens)
        assert size - num_tokens < num_tokens / 8


def test_recordings_end_where_the_host_is_faster():
    assert piece_sizes(spec_of(SMALL), 8192)[-1] == 8192
    assert 1024 < piece_sizes(spec_of(LARGE), 8192)[-1] < 4096
    assert piece_sizes(spec_of(LARGE), 8192, 4)[-1] == 8192  # each rank has a quarter of the products


def test_the_budget_is_a_size():
    """Steps of a busy server are filled with prompts: they are not padded."""
    assert piece_sizes(spec_of(SMALL), 48) == [16, 32, 48]
    assert piece_sizes(spec_of(SMALL), 2047)[-2:] == [1920, 2047]
