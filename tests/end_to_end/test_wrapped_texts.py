"""Language models that come with an encoder which is not served, of families that are tested elsewhere: the tensors are
found among the encoder's, and the settings are those of the text part.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.test_families import VISION, assert_same_text, prompts  # noqa: F401
from tests.helpers.models.document_models import correct_names
from tests.helpers.models.families import FAMILIES, SEEING, redraw

_SMALL = {"image_size": 28, "patch_size": 14}
_QWEN3 = {key: value for key, value in FAMILIES["seed_oss"][1].items() if key != "pad_token_id"}
_THIRD = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}}
_THIRD["rope_parameters"]["partial_rotary_factor"] = 0.25
# type of the wrapper -> (that of its text, settings, those of the encoder, others of the wrapper)
WRAPPED = {
    "glm_ocr": ("glm_ocr_text", SEEING["glm4v"][1]["text_config"], SEEING["glm4v"][1]["vision_config"], {}),
    "granite4_vision": (
        "granite4_vision_text",
        FAMILIES["granite"][1],
        {"model_type": "siglip_vision_model", "hidden_size": 64} | _SMALL,
        {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"}
        | {"image_grid_pinpoints": [[28, 28]]},
    ),
    "granite_docling": ("granite_docling_text", FAMILIES["granite"][1], {"out_hidden_size": 32}, {}),
    "hyperclovax_vision_v2": ("hyperclovax", FAMILIES["hyperclovax"][1], {"depth": 1, "num_heads": 2}, {}),
    "lfm3_vl": (
        "lfm3",
        FAMILIES["lfm3"][1],
        {"num_key_value_heads": 1, "layer_types": ["conv"]},
        {"projector_hidden_size": 16},
    ),
    "lighton_ocr": ("qwen3", _QWEN3, {"model_type": "pixtral", "head_dim": 8} | _SMALL, {}),
    "minicpmv4_7": ("qwen3_5_text", FAMILIES["qwen3_5"][1] | _THIRD, {"image_size": 32, "insert_layer_id": 0}, {}),
    "qianfan_ocr": ("qwen3", _QWEN3, _SMALL, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_of_a_wrapper(name, prompts, tmp_path):  # noqa: F811
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, text, vision, others = WRAPPED[name]
    text = text | {"model_type": kind, "tie_word_embeddings": True}
    config = CONFIG_MAPPING[name](text_config=text, vision_config=VISION | vision, tie_word_embeddings=True, **others)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    redraw(model)
    model.save_pretrained(tmp_path)
    correct_names(name, tmp_path)
    assert_same_text(model, tmp_path, prompts)
