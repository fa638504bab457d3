"""Builds tiny random checkpoints of the newest models that read images and documents, as transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.models.families import FAMILIES, SEEING, redraw

IMAGE_TOKEN_ID, VIDEO_TOKEN_ID = 10, 11
SIDE, PATCH = 32, 4
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 64,
    "patch_size": PATCH,
    "hidden_act": "silu",
}
_SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_GLM = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": PATCH,
    "image_size": 5 * PATCH,
    "out_hidden_size": 32,
    "intermediate_size": 40,
}
_LFM3 = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "patch_size": PATCH,
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 1]}
_QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
_QWEN3 = {key: value for key, value in FAMILIES["seed_oss"][1].items() if key != "pad_token_id"}
_WIDE = {"max_position_embeddings": 2048, "vocab_size": VOCAB_SIZE}
_GRANITE = FAMILIES["granite"][1] | _WIDE | {"num_hidden_layers": 4}


def _text(of: str) -> dict[str, Any]:
    return SEEING[of][1]["text_config"] | _WIDE


# name -> (type of the wrapper, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_large4": ("mistral_large4", {"text_config": _text("mistral_large4"), "vision_config": _PIXTRAL}),
    "inkling": (
        "inkling_mm_model",
        {
            "text_config": _text("inkling") | {"unpadded_vocab_size": VOCAB_SIZE},
            "vision_config": {"patch_size": 2 * PATCH, "num_hidden_layers": 4},
            "audio_config": {"n_mel_bins": 2},
        },
    ),
    "inkling2": (
        "inkling2",
        {
            "text_config": FAMILIES["inkling2"][1] | _WIDE | {"unpadded_vocab_size": VOCAB_SIZE},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": PATCH,
                "posemb_grid_size": 3,
                "projection_hidden_dim": 24,
                "text_hidden_size": FAMILIES["inkling2"][1]["hidden_size"],
            },
        },
    ),
    "lighton_ocr": (
        "lighton_ocr",
        {"text_config": _QWEN3 | _WIDE | {"model_type": "qwen3"}, "vision_config": _PIXTRAL},
    ),
    "lfm3_vl": (
        "lfm3_vl",
        {
            "text_config": FAMILIES["lfm3"][1] | _WIDE | {"model_type": "lfm3"},
            "vision_config": _LFM3,
            "projector_hidden_size": 24,
        },
    ),
    "glm_ocr": (
        "glm_ocr",
        {
            "text_config": _text("glm4v") | {"model_type": "glm_ocr_text", "rope_parameters": _AXES},
            "vision_config": _GLM,
        },
    ),
    "glm4v": ("glm46v", {"text_config": _text("glm4v") | {"rope_parameters": _AXES}, "vision_config": _GLM}),
    "glm4v_moe": (
        "glm4v_moe",
        {
            "text_config": _text("glm4v_moe") | {"rope_parameters": _AXES | {"partial_rotary_factor": 0.5}},
            "vision_config": _GLM,
        },
    ),
    "qianfan_ocr": (
        "qianfan_ocr",
        {
            "text_config": _QWEN3 | _WIDE | {"model_type": "qwen3"},
            "vision_config": {key: _SIGLIP[key] for key in _SIGLIP if key not in ("image_size", "patch_size")}
            | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        },
    ),
    "kimi_k25": (
        "kimi_k25",
        {
            "text_config": FAMILIES["kimi_k2"][1] | _WIDE | {"model_type": "deepseek_v3"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": PATCH,
                "pos_emb_height": 6,
                "pos_emb_width": 6,
            },
            "projection_hidden_size": 32,
        },
    ),
    "minicpmv4_6": (
        "minicpmv4_6",
        {
            "text_config": FAMILIES["qwen3_5"][1] | _WIDE | {"model_type": "qwen3_5_text", "rope_parameters": _QUARTER},
            "vision_config": _SIGLIP | {"image_size": 5 * PATCH},
            "insert_layer_id": 1,
        },
    ),
    "granite_docling": (
        "granite_docling",
        {
            "text_config": _GRANITE | {"model_type": "granite_docling_text"},
            "vision_config": _SIGLIP
            | {"out_hidden_size": _GRANITE["hidden_size"], "deepstack_visual_indexes": [0, 2], "scale_factor": 4},
            "density_router_hidden_size": 8,
        },
    ),
    "granite4_vision": (
        "granite4_vision",
        {
            "text_config": _GRANITE | {"model_type": "granite4_vision_text"},
            "vision_config": _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "deepstack_layer_map": [[-1, 0], [1, 2]],
            "spatial_target_layers": [1, 2, 3, 3],
            "downsample_rate": "2/4",
            "image_grid_pinpoints": [[SIDE * rows, SIDE * columns] for rows in (1, 2) for columns in (1, 2)],
            "vision_feature_select_strategy": "full",
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 2,
                "intermediate_size": 24,
                "cross_attention_frequency": 1,
                "use_qformer_text_input": False,
            },
        },
    ),
}
MODELS["minicpmv4_6-4x"] = ("minicpmv4_6", MODELS["minicpmv4_6"][1] | {"downsample_mode": "4x"})
_PIXELS = {"min_pixels": 64, "max_pixels": 64 * 24, "patch_size": PATCH}
_TILES = {"size": {"height": SIDE, "width": SIDE}}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "mistral_large4": {"size": {"longest_edge": 48}},
    "inkling2": {"size": {"height": 2 * PATCH, "width": 2 * PATCH}},
    "inkling": {"size": {"height": 2 * PATCH, "width": 2 * PATCH}},
    "lighton_ocr": {"size": {"longest_edge": 48}},
    "lfm3_vl": _PIXELS,
    "glm_ocr": _PIXELS | {"max_pixels": 2 * 64 * 24},
    "glm4v": _PIXELS | {"max_pixels": 2 * 64 * 24},
    "glm4v_moe": _PIXELS | {"max_pixels": 2 * 64 * 24},
    "granite_docling": _TILES | {"max_patches": 4},
    "qianfan_ocr": _TILES | {"max_patches": 4},
    "granite4_vision": _TILES,
    "kimi_k25": {"max_patches": 96},
    "minicpmv4_6": {"patch_size": PATCH, "scale_resolution": 48, "max_slice_nums": 4},
}
PREPROCESSORS["minicpmv4_6-4x"] = PREPROCESSORS["minicpmv4_6"] | {"downsample_mode": "4x", "scale_resolution": 28}


def build_model(name: str, folder: str | Path) -> Any:
    """Write the checkpoint into `folder` and return transformers' model."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, settings = MODELS[name]
    text = {"tie_word_embeddings": False} | settings["text_config"]
    token = "image_token_index" if name in ("mistral_large4", "granite4_vision") else "image_token_id"
    others = {token: IMAGE_TOKEN_ID, "tie_word_embeddings": False}
    if name.startswith(("glm", "lfm3", "kimi", "minicpm")):
        others["video_token_id"] = VIDEO_TOKEN_ID
    config = CONFIG_MAPPING[kind](**settings | {"text_config": text} | others)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    redraw(model)
    model.save_pretrained(folder)
    Path(folder, "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))
    return model


# names of tensors in which transformers mixes up parts of the model -> those of published files
_WRONG = {
    "qianfan_ocr": {"language_model.model.encoder.": "language_model.model."},
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    },
}


def correct_names(name: str, folder: str | Path) -> None:
    """Give the tensors that transformers saves under wrong names those of published files."""
    if name not in _WRONG:
        return
    from safetensors.torch import load_file, save_file

    path = Path(folder, "model.safetensors")
    tensors = load_file(path)
    for wrong, right in _WRONG[name].items():
        tensors = {key.replace(wrong, right): value for key, value in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
