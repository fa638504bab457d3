"""Rotary embeddings of positions with three axes equal transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from quire.worker.models.qwen_vl import axes_of_pairs
from quire.worker.models.registry import parse_model_spec
from quire.worker.transformer.decoder import RotaryEmbeddings

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "reference", "architecture"),
    [
        ("paddleocr_vl", PaddleOCRRotaryEmbedding, "PaddleOCRVLForConditionalGeneration"),
        ("qwen2_vl", Qwen2VLRotaryEmbedding, "Qwen2_5_VLForConditionalGeneration"),
        ("qwen3_vl", Qwen3VLTextRotaryEmbedding, "Qwen3VLForConditionalGeneration"),
    ],
)
def test_equals_transformers(family, reference, architecture):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    config = CONFIG_MAPPING[f"{family}_text"](**SIZES, rope_parameters=rope)
    spec = parse_model_spec({"architectures": [architecture], "text_config": SIZES | {"rope_parameters": rope}})
    positions = torch.randint(200, (3, 7), generator=torch.Generator().manual_seed(0))
    rotation = RotaryEmbeddings(spec, 200)(positions)["default"]
    cos, sin = (part[0, :, :8] for part in reference(config)(torch.zeros(1), positions[:, None]))
    torch.testing.assert_close(rotation.cos_sin[rotation.positions], torch.cat((cos, sin), -1))


def test_equal_axes_are_the_plain_embedding():
    spec = parse_model_spec(
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": SIZES | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
        }
    )
    embeddings, positions = RotaryEmbeddings(spec, 50), torch.tensor([3, 49, 0])
    plain, axial = (embeddings(p)["default"] for p in (positions, positions.expand(3, -1)))
    assert torch.equal(plain.cos_sin[plain.positions], axial.cos_sin[axial.positions])


def test_a_part_of_each_head_turns():
    """Qwen3.5: the pairs that do not rotate have no axis."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    text = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 4}
    config = CONFIG_MAPPING["qwen3_5_text"](**text, rope_parameters=rope)
    wrapper = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text | {"rope_parameters": rope}}
    positions = torch.randint(200, (3, 7), generator=torch.Generator().manual_seed(0))
    rotation = RotaryEmbeddings(parse_model_spec(wrapper), 200)(positions)["default"]
    cos, sin = (part[0, :, :4] for part in Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions[:, None]))
    got_cos, got_sin = rotation.cos_sin[rotation.positions].chunk(2, -1)
    torch.testing.assert_close((got_cos[:, :4], got_sin[:, :4]), (cos, sin))
    assert (got_cos[:, 4:] == 1).all() and (got_sin[:, 4:] == 0).all()


def test_axes():
    assert axes_of_pairs((2, 1, 1), 4, False) == (0, 0, 1, 2)
    assert axes_of_pairs((2, 1, 1), 4, True) == (0, 1, 2, 0)
    assert axes_of_pairs((4, 3, 1), 8, True) == (0, 1, 2, 0, 1, 0, 0, 1)
    with pytest.raises(ValueError, match=r"mrope_section \[1, 1, 1\] must be three numbers with the sum 4"):
        axes_of_pairs([1, 1, 1], 4, False)
