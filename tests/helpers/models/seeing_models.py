"""Writes whole folders of tiny models that read images, with a tokenizer, a chat template and a preprocessor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from tests.helpers.models import deepseek_ocr_reading as reading
from tests.helpers.models.checkpoints import _byte_level
from tests.helpers.models.qwen_gemma_models import build_model

IMAGE_PAD = 500  # the first id after the tokenizer's words
QWEN_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'text' %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# processor_config.json of deepseek-ai/DeepSeek-OCR
HUB_PROCESSOR = {
    "add_special_token": False,
    "candidate_resolutions": [[1024, 1024]],
    "downsample_ratio": 4,
    "ignore_id": -100,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_token": "<image>",
    "mask_prompt": False,
    "normalize": True,
    "pad_token": "<\uff5c\u2581pad\u2581\uff5c>",
    "patch_size": 16,
    "processor_class": "DeepseekVLV2Processor",
    "sft_format": "deepseek",
}
QWEN_SIZES = {"min_pixels": 64, "max_pixels": 64 * 40, "patch_size": 4, "merge_size": 2}


def write_qwen(folder: Path) -> Any:
    """Write a Qwen2-VL and return transformers' model."""
    tokenizer = _byte_level()
    names = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE_PAD
    ids = {"image_token_id": IMAGE_PAD, "vision_start_token_id": IMAGE_PAD + 1, "video_token_id": IMAGE_PAD + 3}
    model = build_model("qwen2_vl", folder, **ids)
    with torch.no_grad():
        model.lm_head.weight[IMAGE_PAD:] = 0  # as a trained model, it writes no images
    model.save_pretrained(folder)
    _write(folder, tokenizer, {"chat_template": QWEN_TEMPLATE})
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_SIZES))
    return model


def write_deepseek_ocr(folder: Path) -> reading.Tensors:
    """Write a DeepSeek-OCR in the layout of the Hub, without a chat template, and return its tensors."""
    data = json.loads(_byte_level().to_str())
    vocabulary, image = data["model"]["vocab"], reading.IMAGE_TOKEN_ID
    replaced = next(word for word, number in vocabulary.items() if number == image)
    del vocabulary[replaced]
    words = {word for word, number in vocabulary.items() if number < reading.TEXT["vocab_size"]}
    data["model"]["vocab"] = {word: number for word, number in vocabulary.items() if word in words} | {"<image>": image}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in data["model"]["merges"]]
    data["model"]["merges"] = [merge for merge in merges if {*merge, "".join(merge)} <= words]
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"].append({"id": image, "content": "<image>"} | special)
    _write(folder, Tokenizer.from_str(json.dumps(data)), {})
    tensors = reading.write_checkpoint(folder)
    weights = "model-00001-of-000001.safetensors"
    (folder / "model.safetensors").rename(folder / weights)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, weights)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "processor_config.json").write_text(json.dumps(HUB_PROCESSOR))
    for name in ("modeling_deepseekocr", "configuration_deepseek_v2", "deepencoder", "conversation"):
        (folder / f"{name}.py").write_text("raise SystemExit('remote code must not run')\n")
    return tensors


def _write(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | settings))
