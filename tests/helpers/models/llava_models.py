"""Builds tiny random checkpoints of Llava, its relatives and Idefics, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.models.families import redraw

IMAGE_TOKEN_ID = 10
SIDE, PATCH = 30, 7  # of the encoders for images of one size; a patch does not divide it, as with SigLIP
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
_FIXED = _VISION | {"image_size": SIDE, "patch_size": PATCH}
_PIXTRAL = _VISION | {"model_type": "pixtral", "image_size": 56, "patch_size": PATCH}
_SIGLIP = _FIXED | {"model_type": "siglip_vision_model", "vision_use_head": False}
_GRIDS = [[SIDE * rows, SIDE * columns] for rows in range(1, 4) for columns in range(1, 4)]
_INTERN = _VISION | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH], "num_hidden_layers": 2}

# name -> (prefix of transformers' classes, model_type of the text part, settings)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral3": ("Mistral3", "mistral", {"vision_config": _PIXTRAL, "image_token_index": IMAGE_TOKEN_ID}),
    "pixtral": (
        "Llava",
        "mistral",
        {"vision_config": _PIXTRAL, "image_token_index": IMAGE_TOKEN_ID}
        | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "llava": (
        "Llava",
        "llama",
        {"vision_config": _FIXED | {"model_type": "clip_vision_model"}, "image_token_index": IMAGE_TOKEN_ID},
    ),
    "internvl": ("InternVL", "qwen2", {"vision_config": _INTERN, "image_token_id": IMAGE_TOKEN_ID}),
    "internvl-6b": (  # the settings of InternViT-6B
        "InternVL",
        "qwen2",
        {"image_token_id": IMAGE_TOKEN_ID}
        | {"vision_config": _INTERN | {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True}},
    ),
    "llava_onevision": (
        "LlavaOnevision",
        "qwen2",
        {"vision_config": _SIGLIP, "image_token_index": IMAGE_TOKEN_ID, "image_grid_pinpoints": _GRIDS}
        | {"vision_aspect_ratio": "anyres_max_4"},
    ),
    "aya_vision": (
        "AyaVision",
        "cohere2",
        {"vision_config": _SIGLIP, "image_token_index": IMAGE_TOKEN_ID, "downsample_factor": 2}
        | {"alignment_intermediate_size": 40},
    ),
    "cohere2_vision": (
        "Cohere2Vision",
        "cohere2",
        {"vision_config": _SIGLIP, "image_token_id": IMAGE_TOKEN_ID, "alignment_intermediate_size": 40},
    ),
    "llava_next": (
        "LlavaNext",
        "mistral",
        {"vision_config": _FIXED | {"model_type": "clip_vision_model"}, "image_token_index": IMAGE_TOKEN_ID}
        | {"image_grid_pinpoints": _GRIDS},
    ),
    "lfm2_vl": (
        "Lfm2Vl",
        "lfm2",
        {"image_token_id": IMAGE_TOKEN_ID, "projector_hidden_size": 40}
        | {"vision_config": _VISION | {"model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 25}},
    ),
    "idefics3": ("Idefics3", "llama", {"vision_config": _FIXED, "image_token_id": IMAGE_TOKEN_ID, "scale_factor": 2}),
    "smolvlm": ("SmolVLM", "llama", {"vision_config": _FIXED, "image_token_id": IMAGE_TOKEN_ID, "scale_factor": 2}),
}


_TEXTS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "logit_scale": 1.0},
}
# preprocessor_config.json, where the defaults would make many tokens
PREPROCESSORS = {
    "aya_vision": {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4},
    "cohere2_vision": {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4},
    "mistral3": {"size": {"longest_edge": 56}},
    "pixtral": {"size": {"longest_edge": 56}},
    "idefics3": {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
    "smolvlm": {"size": {"longest_edge": 2 * SIDE}, "do_image_splitting": False},
    "lfm2_vl": {"encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 4, "max_image_tokens": 12}
    | {"max_tiles": 4},
}


def build_model(name: str, folder: str | Path, **overrides: Any) -> Any:
    """Write the checkpoint into `folder` and return transformers' model."""
    import torch
    import transformers

    prefix, text_type, settings = MODELS[name]
    text = {"model_type": text_type} | _TEXT | _TEXTS.get(text_type, {})
    settings = settings | {"text_config": text, "tie_word_embeddings": False} | overrides
    config = getattr(transformers, f"{prefix}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    redraw(model)
    model.save_pretrained(folder)
    Path(folder, "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS.get(name, {})))
    return model
