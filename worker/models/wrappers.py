"""Architectures that add an encoder to a language model: where both are implemented. Torch-free until a tower is built.

A family with images is one line in `WRAPPERS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.worker.transformer.reader import text_part

if TYPE_CHECKING:
    from quire.worker.transformer.vision.tower import VisionTower


@dataclass(frozen=True, slots=True)
class Wrapper:
    """`tower` is module and class below `worker/models/vision`, or `folder`; without one, text alone is served. `text`
    is the architecture of the language model, a key of `MODELS`; by default it follows from the `model_type` of the
    text part of config.json.
    """

    tower: str = ""
    text: str = ""
    folder: str = "vision"

    def describes_tower(self, raw: dict[str, Any]) -> bool:
        """Return whether a parsed config.json has the settings of the encoder."""
        return bool(self.tower) and (self.folder == "audio" or bool(raw.get("vision_config")))


WRAPPERS: dict[str, Wrapper] = {
    "AyaVisionForConditionalGeneration": Wrapper("aya_vision:AyaVisionTower"),
    "Cohere2VisionForConditionalGeneration": Wrapper("aya_vision:Cohere2VisionTower"),
    "DeepseekOCR2ForCausalLM": Wrapper("deepseek_ocr:DeepseekOCR2Tower", "DeepseekForCausalLM"),
    "DeepseekOCRForCausalLM": Wrapper("deepseek_ocr:DeepseekOCRTower", "DeepseekForCausalLM"),
    "DeepseekOcr2ForConditionalGeneration": Wrapper("deepseek_ocr:DeepseekOCR2Tower", "DeepseekForCausalLM"),
    "Dots3NoteForConditionalGeneration": Wrapper(),
    "EmbeddingGemma2Model": Wrapper("", "EmbeddingGemma2TextModel"),
    "Exaone4_5_ForConditionalGeneration": Wrapper(),
    "Gemma3ForConditionalGeneration": Wrapper("gemma3:Gemma3Tower"),
    "Gemma3nForConditionalGeneration": Wrapper(),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4:Gemma4Tower"),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(),
    "Glm46VForConditionalGeneration": Wrapper("glm4v:Glm4vTower"),
    "Glm4vForConditionalGeneration": Wrapper("glm4v:Glm4vTower"),
    "Glm4vMoeForConditionalGeneration": Wrapper("glm4v:Glm4vTower"),
    "Glm5NextForConditionalGeneration": Wrapper(),
    "GlmOcrForConditionalGeneration": Wrapper("glm4v:GlmOcrTower"),
    "Granite4VisionForConditionalGeneration": Wrapper("granite4_vision:Granite4VisionTower"),
    "GraniteDoclingForConditionalGeneration": Wrapper("granite_docling:GraniteDoclingTower"),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Wrapper(),
    "Idefics3ForConditionalGeneration": Wrapper("idefics3:Idefics3Tower"),
    "InklingForConditionalGeneration": Wrapper("inkling:InklingTower", "InklingForCausalLM"),
    "Inkling2ForConditionalGeneration": Wrapper("inkling2:Inkling2Tower", "Inkling2ForCausalLM"),
    "InternS2PreviewForConditionalGeneration": Wrapper("qwen3_vl:Qwen35Tower", "Qwen3_5MoeVLForCausalLM"),
    "InternVLForConditionalGeneration": Wrapper("intern_vit:InternVLTower"),
    "KimiK25ForConditionalGeneration": Wrapper("kimi_k25:KimiK25Tower"),
    "Kimi_K25ForConditionalGeneration": Wrapper("kimi_k25:KimiK25Tower"),
    "Llama4ForConditionalGeneration": Wrapper(),
    "Lfm2VlForConditionalGeneration": Wrapper("lfm2_vl:Lfm2VLTower"),
    "Lfm3VlForConditionalGeneration": Wrapper("lfm3_vl:Lfm3VLTower"),
    "LightOnOCRForConditionalGeneration": Wrapper("pixtral:LightOnOCRTower", "Qwen3ForCausalLM"),
    "LightOnOcrForConditionalGeneration": Wrapper("pixtral:LightOnOCRTower", "Qwen3ForCausalLM"),
    "LlavaForConditionalGeneration": Wrapper("llava:LlavaTower"),
    "LlavaNextForConditionalGeneration": Wrapper("llava_onevision:LlavaNextTower"),
    "LlavaOnevisionForConditionalGeneration": Wrapper("llava_onevision:LlavaOnevisionTower"),
    "MiniCPMV4_6ForConditionalGeneration": Wrapper("minicpmv4_6:MiniCPMV46Tower"),
    "MiniCPMV4_7ForConditionalGeneration": Wrapper(),
    "MiniMaxM3SparseForConditionalGeneration": Wrapper(),
    "Mistral3ForConditionalGeneration": Wrapper("pixtral:Mistral3Tower"),
    "MistralLarge4ForConditionalGeneration": Wrapper("pixtral:MistralLarge4Tower"),
    "MuseGlimmerForConditionalGeneration": Wrapper(),
    "NemotronH_Omni_Reasoning_V3": Wrapper(),
    "NemotronH_Nano_Omni_Reasoning_V3": Wrapper(),
    "PaddleOCRVLForConditionalGeneration": Wrapper("paddleocr_vl:PaddleOCRVLTower", "PaddleOCRVLForCausalLM"),
    "QianfanOCRForConditionalGeneration": Wrapper("intern_vit:QianfanOCRTower"),
    "Qwen2VLForConditionalGeneration": Wrapper("qwen2_vl:Qwen2VLTower", "Qwen2VLForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper("qwen2_5_vl:Qwen2_5VLTower", "Qwen2VLForCausalLM"),
    "Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl:Qwen3VLTower", "Qwen3VLForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": Wrapper("qwen3_vl:Qwen3VLTower", "Qwen3VLMoeForCausalLM"),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_vl:Qwen35Tower", "Qwen3_5VLForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_vl:Qwen35Tower", "Qwen3_5MoeVLForCausalLM"),
    "Qwen4ExpForConditionalGeneration": Wrapper("qwen3_vl:Qwen35Tower", "Qwen4ExpVLForCausalLM"),
    "Qwen3ASRForConditionalGeneration": Wrapper("qwen3_asr:Qwen3ASREncoder", "Qwen3ForCausalLM", "audio"),
    "SmolVLMForConditionalGeneration": Wrapper("idefics3:Idefics3Tower"),
    "Step3p7ForConditionalGeneration": Wrapper("", "Step3p5ForCausalLM"),
    "UnlimitedOCRForCausalLM": Wrapper("deepseek_ocr:DeepseekOCRTower", "DeepseekForCausalLM"),
    "UnlimitedOcrForConditionalGeneration": Wrapper("deepseek_ocr:DeepseekOCRTower", "DeepseekForCausalLM"),
    "WhisperForConditionalGeneration": Wrapper("whisper:WhisperEncoder", "WhisperForCausalLM", "audio"),
}
# `model_type` of the text part -> its architecture
_TEXT = {
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots3_note_text": "Dots3NoteForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm5_next_text": "Glm5NextForCausalLM",
    "glm4v_text": "Glm4vForCausalLM",
    "glm4v_moe_text": "Glm4vMoeForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm_ocr_text": "GlmOcrForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite4_vision_text": "GraniteForCausalLM",
    "granite_docling_text": "GraniteDoclingForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4_text": "MistralLarge4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "muse_glimmer_text": "MuseGlimmerForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def wrapper_of(raw: dict[str, Any]) -> str | None:
    """Return the architecture of a wrapper that a parsed config.json names, or None."""
    return next((name for name in raw.get("architectures") or [] if name in WRAPPERS), None)


def text_architecture(wrapper: str, raw: dict[str, Any]) -> str:
    """Return the architecture of a wrapper's language model. Raises ValueError if it is not supported."""
    if WRAPPERS[wrapper].text:
        return WRAPPERS[wrapper].text
    model_type = text_part(raw).get("model_type")
    if model_type not in _TEXT:
        raise ValueError(
            f"{wrapper} with a text part of model_type {model_type!r} is not supported; supported: {', '.join(_TEXT)}"
        )
    return _TEXT[model_type]


def tower_class(wrapper: str) -> type[VisionTower] | None:
    """Return the class of a wrapper's encoder, or None if text alone is served."""
    if not WRAPPERS[wrapper].tower:
        return None
    module, name = WRAPPERS[wrapper].tower.split(":")
    return getattr(importlib.import_module(f"quire.worker.models.{WRAPPERS[wrapper].folder}.{module}"), name)
