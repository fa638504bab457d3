"""Builds tiny random checkpoints of the DeepSeek-OCR family, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.models.families import redraw

IMAGE_TOKEN_ID = 10
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 2048,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_SAM = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "mlp_dim": 48,
    "image_size": 96,
    "window_size": 4,
    "global_attn_indexes": [1],
    "output_channels": 12,
    "downsample_channels": [16, 24],
}
_CLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QUERIES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def build_model(name: str, folder: str | Path, **text: Any) -> Any:
    """Write the checkpoint of "unlimited_ocr" or "deepseek_ocr2" into `folder` and return transformers' model."""
    import torch
    import transformers

    prefix, encoder = {"unlimited_ocr": ("UnlimitedOcr", _CLIP), "deepseek_ocr2": ("DeepseekOcr2", _QUERIES)}[name]
    window = {"sliding_window": 1 << 20} if name == "unlimited_ocr" else {}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=_TEXT | window | text,
        vision_config={"sam_config": _SAM, "encoder_config": encoder},
        image_token_id=IMAGE_TOKEN_ID,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    redraw(model)
    model.save_pretrained(folder)
    return model
