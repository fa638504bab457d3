"""The models that read images, by the architecture in config.json. A family's module is imported with the first image:
this one loads neither numpy nor Pillow.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints.config_schema import unwrapped
from quire.checkpoints.reading import read_object, reading

if TYPE_CHECKING:
    from quire.server.media.processor import ImageProcessor
    from quire.server.media.video.processor import VideoProcessor

_HERE = "quire.server.media"
# architecture -> module below families, and class of its ImageProcessor
PROCESSORS: dict[str, str] = {
    "AyaVisionForConditionalGeneration": "aya_vision:AyaVisionProcessor",
    "Cohere2VisionForConditionalGeneration": "aya_vision:Cohere2VisionProcessor",
    "DeepseekOCR2ForCausalLM": "deepseek_ocr:DeepseekOCR2Processor",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr:DeepseekOCR2Processor",
    "DeepseekOCRForCausalLM": "deepseek_ocr:DeepseekOCRProcessor",
    "Gemma3ForConditionalGeneration": "gemma:Gemma3Processor",
    "Gemma4ForConditionalGeneration": "gemma:Gemma4Processor",
    "Glm46VForConditionalGeneration": "qwen_vl:GlmVProcessor",
    "Glm4vForConditionalGeneration": "qwen_vl:GlmVProcessor",
    "Glm4vMoeForConditionalGeneration": "qwen_vl:GlmVProcessor",
    "GlmOcrForConditionalGeneration": "qwen_vl:GlmVProcessor",
    "Granite4VisionForConditionalGeneration": "llava_next:Granite4VisionProcessor",
    "GraniteDoclingForConditionalGeneration": "granite_docling:GraniteDoclingProcessor",
    "Idefics3ForConditionalGeneration": "idefics3:Idefics3Processor",
    "Inkling2ForConditionalGeneration": "inkling:Inkling2Processor",
    "InklingForConditionalGeneration": "inkling:InklingProcessor",
    "InternS2PreviewForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "InternVLForConditionalGeneration": "internvl:InternVLProcessor",
    "KimiK25ForConditionalGeneration": "kimi_k25:KimiK25Processor",
    "Kimi_K25ForConditionalGeneration": "kimi_k25:KimiK25Processor",
    "Lfm2VlForConditionalGeneration": "lfm2_vl:Lfm2VLProcessor",
    "Lfm3VlForConditionalGeneration": "qwen_vl:Lfm3VLProcessor",
    "LightOnOCRForConditionalGeneration": "pixtral:LightOnOCRProcessor",
    "LightOnOcrForConditionalGeneration": "pixtral:LightOnOCRProcessor",
    "LlavaForConditionalGeneration": "llava:llava_processor",
    "LlavaNextForConditionalGeneration": "llava_next:LlavaNextProcessor",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision:LlavaOnevisionProcessor",
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv:MiniCPMVProcessor",
    "Mistral3ForConditionalGeneration": "pixtral:PixtralProcessor",
    "MistralLarge4ForConditionalGeneration": "pixtral:PixtralProcessor",
    "PaddleOCRVLForConditionalGeneration": "qwen_vl:PaddleOCRVLProcessor",
    "QianfanOCRForConditionalGeneration": "internvl:InternVLProcessor",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "Qwen2VLForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "Qwen3_5ForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "Qwen3_5MoeForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "Qwen4ExpForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "Qwen3VLForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "SmolVLMForConditionalGeneration": "idefics3:Idefics3Processor",
    "UnlimitedOCRForCausalLM": "deepseek_ocr:UnlimitedOCRProcessor",
    "UnlimitedOcrForConditionalGeneration": "deepseek_ocr:UnlimitedOCRProcessor",
}
# architecture -> module and class of its VideoProcessor
VIDEO_PROCESSORS: dict[str, str] = {
    "InternVLForConditionalGeneration": "video.internvl:InternVLVideoProcessor",
    "Qwen2VLForConditionalGeneration": "video.qwen_vl:Qwen2VLVideoProcessor",
    "Qwen2_5_VLForConditionalGeneration": "video.qwen_vl:Qwen2VLVideoProcessor",
    "Qwen3VLForConditionalGeneration": "video.qwen_vl:Qwen3VLVideoProcessor",
    "Qwen3VLMoeForConditionalGeneration": "video.qwen_vl:Qwen3VLVideoProcessor",
    "Qwen3_5ForConditionalGeneration": "video.qwen_vl:Qwen3VLVideoProcessor",
    "Qwen3_5MoeForConditionalGeneration": "video.qwen_vl:Qwen3VLVideoProcessor",
    "Qwen4ExpForConditionalGeneration": "video.qwen_vl:Qwen3VLVideoProcessor",
}
# architecture of a vision model of which quire serves only the text -> the reason, for the client
TEXT_ONLY: dict[str, str] = {}


def why_no_images(config: dict[str, Any]) -> str | None:
    """Return why the model of this config.json cannot take images, as the end of a sentence; None if it can."""
    names = config.get("architectures") or []
    if (why := next((TEXT_ONLY[name] for name in names if name in TEXT_ONLY), None)) is not None:
        return why
    if _find(config) is None:
        return f"its architecture ({', '.join(names) or 'none is named'}) reads text only"
    if "vision_config" not in config:
        return "its config.json describes no vision encoder"
    return None


def why_no_videos(config: dict[str, Any]) -> str | None:
    """Return why a model that reads images cannot take videos, as the end of a sentence; None if it can."""
    names = config.get("architectures") or []
    if _find(config, VIDEO_PROCESSORS) is None:
        return f"its architecture ({', '.join(names) or 'none is named'}) reads images only"
    return None


def _find(config: dict[str, Any], known: dict[str, str] = PROCESSORS) -> str | None:
    return next((known[name] for name in config.get("architectures") or [] if name in known), None)


def load_processor(folder: str | Path) -> ImageProcessor:
    """Return the processor of the model in `folder`. Raises ValueError if the model takes no images, naming a setting
    that is not supported or a file that cannot be read.
    """
    config = read_config(folder)
    if (why := why_no_images(config)) is not None:
        raise ValueError(f"the model takes no images: {why}")
    with reading(folder):
        return _class(f"families.{_find(config)}")(config, _preprocessor(Path(folder)))


def load_video_processor(folder: str | Path) -> VideoProcessor:
    """Return the video processor of the model in `folder`, which reads images. Raises ValueError naming a setting that
    is not supported or a file that cannot be read.
    """
    config = read_config(folder)
    with reading(folder):
        return _class(_find(config, VIDEO_PROCESSORS))(config, _video_preprocessor(Path(folder)))


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"{_HERE}.{module}"), name)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json, with the parts of a thinker at its top level; {} without the file."""
    return unwrapped(read_object(Path(folder) / "config.json"))


def _preprocessor(folder: Path) -> dict[str, Any]:
    """Return preprocessor_config.json, or the image processor's part of processor_config.json; the latter's other plain
    settings, such as the number of tokens of an image, count where the image processor has none of that name, and so
    does the image token of tokenizer_config.json.
    """
    own = read_object(folder / "preprocessor_config.json")
    joint = read_object(folder / "processor_config.json")
    plain = {name: value for name, value in joint.items() if not isinstance(value, dict)}
    token = read_object(folder / "tokenizer_config.json").get("image_token")
    token = token.get("content") if isinstance(token, dict) else token
    return ({"image_token": token} if token else {}) | plain | (own or joint.get("image_processor") or {})


def _video_preprocessor(folder: Path) -> dict[str, Any]:
    """Return the video processor's part of processor_config.json, or video_preprocessor_config.json, or, of older
    checkpoints, preprocessor_config.json.
    """
    joint = read_object(folder / "processor_config.json")
    names = "video_preprocessor_config.json", "preprocessor_config.json"
    return joint.get("video_processor") or next(filter(None, (read_object(folder / name) for name in names)), {})
