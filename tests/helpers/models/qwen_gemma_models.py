"""Builds tiny random checkpoints of Qwen-VL and Gemma with images, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.models.families import redraw

IMAGE_TOKEN_ID, VIDEO_TOKEN_ID, PAD_TOKEN_ID = 10, 11, 0
PATCH, GEMMA3_SIDE = 4, 32
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD_TOKEN_ID,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN = {"image_token_id": IMAGE_TOKEN_ID, "video_token_id": VIDEO_TOKEN_ID, "vision_start_token_id": 12}
_BLOCKS = {"depth": 4, "num_heads": 2, "patch_size": PATCH}
_WINDOWS = {"window_size": 4 * PATCH, "fullatt_block_indexes": [1], "intermediate_size": 40}
_DEEP = {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 25, "intermediate_size": 40}
_QWEN3_TEXT = _TEXT | {"head_dim": 16, "rope_parameters": _MROPE | {"mrope_section": [4, 2, 2]}}
_PLAIN_QWEN3 = _BLOCKS | {
    "num_position_embeddings": 25,
    "intermediate_size": 40,
    "hidden_size": 32,
    "out_hidden_size": 32,
}
_QWEN35_TEXT = _TEXT | {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": _MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
}
_QWEN4_TEXT = {key: value for key, value in _QWEN35_TEXT.items() if key != "intermediate_size"} | {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "shared_expert_intermediate_size": 24,
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1, 3],
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 3,
    "indexer_n_heads": 24,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 20,
    "indexer_compress_ratio": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": GEMMA3_SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
_SIGLIP_ANY = {key: value for key, value in _SIGLIP.items() if key != "vision_use_head"} | {"image_size": 20}
_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
_GEMMA_TEXT = _TEXT | {"head_dim": 16, "sliding_window": 24}
_GEMMA_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA4_TEXT = _GEMMA_TEXT | _GEMMA_LAYERS | {"global_head_dim": 32, "vocab_size_per_layer_input": VOCAB_SIZE}

# name -> (prefix of transformers' classes, settings)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        _QWEN
        | {"text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_section": [2, 1, 1]}}}
        | {"vision_config": _BLOCKS | {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _QWEN
        | {"text_config": _TEXT | {"rope_parameters": _MROPE | {"mrope_section": [2, 1, 1]}}}
        | {"vision_config": _BLOCKS | _WINDOWS | {"hidden_size": 32, "out_hidden_size": 32}},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        _QWEN
        | {"text_config": _QWEN3_TEXT}
        | {"vision_config": _BLOCKS | _DEEP | {"hidden_size": 32, "out_hidden_size": 32}},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _QWEN
        | {"text_config": _QWEN3_TEXT | _EXPERTS}
        | {"vision_config": _BLOCKS | _DEEP | {"hidden_size": 32, "out_hidden_size": 32}},
    ),
    "qwen3_5": (
        "Qwen3_5",
        _QWEN | {"text_config": _QWEN35_TEXT} | {"vision_config": _PLAIN_QWEN3},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _QWEN
        | {"text_config": _QWEN35_TEXT | _EXPERTS | {"shared_expert_intermediate_size": 24}}
        | {"vision_config": _PLAIN_QWEN3},
    ),
    "qwen4_exp": (
        "Qwen4Exp",
        _QWEN | {"text_config": _QWEN4_TEXT | _EXPERTS} | {"vision_config": _PLAIN_QWEN3},
    ),
    "paddleocr_vl": (
        "PaddleOCRVL",
        _QWEN
        | {"text_config": _TEXT | {"head_dim": 8, "rope_parameters": _MROPE | {"mrope_section": [2, 1, 1]}}}
        | {"vision_config": _SIGLIP_ANY},
    ),
    "gemma3": (
        "Gemma3",
        {"image_token_id": IMAGE_TOKEN_ID, "mm_tokens_per_image": 16, "vision_config": _SIGLIP}
        | {"text_config": _GEMMA_TEXT | _GEMMA_LAYERS | {"query_pre_attn_scalar": 32}},
    ),
    "gemma4": (  # as the small ones: per-layer inputs, caches that layers share, causal images
        "Gemma4",
        {"image_token_id": IMAGE_TOKEN_ID, "vision_config": _GEMMA4_VISION | {"use_clipped_linears": True}}
        | {"text_config": _GEMMA4_TEXT | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1}},
    ),
    "gemma4-large": (  # as the large ones: standardized features, images attend in both directions
        "Gemma4",
        {"image_token_id": IMAGE_TOKEN_ID, "vision_config": _GEMMA4_VISION | {"standardize": True}}
        | {"text_config": _GEMMA4_TEXT | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}},
    ),
}


def build_model(name: str, folder: str | Path, **overrides: Any) -> Any:
    """Write the checkpoint into `folder` and return transformers' model."""
    import torch
    import transformers

    prefix, settings = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**{"tie_word_embeddings": False} | settings | overrides)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    redraw(model)
    for buffer, value in model.named_buffers():
        if buffer.endswith(("_min", "_max")):  # of clipped layers
            value.fill_(-1.0 if buffer.endswith("_min") else 1.2)
        elif buffer.endswith(("std_bias", "std_scale")):
            value.copy_(torch.rand(value.shape))
    model.save_pretrained(folder)
    return model
