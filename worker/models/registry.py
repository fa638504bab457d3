"""The model families, by the architecture in config.json. Family modules are imported on demand."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints.reading import reading
from quire.worker.models.wrappers import WRAPPERS, text_architecture, tower_class, wrapper_of
from quire.worker.spec.model import ModelSpec, dtype_of_weights, read_config, with_quantization
from quire.worker.transformer.names import TensorNames
from quire.worker.transformer.tied import has_own_head

if TYPE_CHECKING:
    import torch

    from quire.worker.layers.linear import WeightFormat
    from quire.worker.platforms.ops import Ops
    from quire.worker.spec.vision import VisionSpec
    from quire.worker.transformer.decoder import CausalLM
    from quire.worker.transformer.vision.tower import VisionTower

_HERE = "quire.worker.models"
# architecture -> module and class
DECODERS = {
    "AfmoeForCausalLM": "afmoe:Afmoe",
    "ArceeForCausalLM": "llama:Arcee",
    "AXK1ForCausalLM": "axk1:AXK1",
    "BambaForCausalLM": "bamba:Bamba",
    "BailingHybridForCausalLM": "bailing_hybrid:BailingHybrid",
    "BailingMoeV2_5ForCausalLM": "bailing_linear:BailingLinear",
    "BailingMoeV3ForCausalLM": "bailing_hybrid:BailingHybrid",
    "CohereForCausalLM": "cohere:Cohere",
    "Cohere2ForCausalLM": "cohere:Cohere2",
    "Cohere2MoeForCausalLM": "cohere2_moe:Cohere2Moe",
    "CwmForCausalLM": "cwm:Cwm",
    "DeepseekForCausalLM": "deepseek:Deepseek",
    "DeepseekV2ForCausalLM": "deepseek:DeepseekV2",
    "DeepseekV3ForCausalLM": "deepseek:DeepseekV3",
    "DeepseekV32ForCausalLM": "deepseek:Indexed",
    "DeepseekV4ForCausalLM": "deepseek_v4:DeepseekV4",
    "Dots1ForCausalLM": "dots1:Dots1",
    "Dots3NoteForCausalLM": "dots3_note:Dots3Note",
    "Ernie4_5ForCausalLM": "ernie4_5:Ernie4_5",
    "Exaone4ForCausalLM": "exaone4:Exaone4",
    "ExaoneMoeForCausalLM": "exaone_moe:ExaoneMoe",
    "FalconH1ForCausalLM": "falcon_h1:FalconH1",
    "FalconMambaForCausalLM": "mamba:FalconMamba",
    "FlexOlmoForCausalLM": "flex_olmo:FlexOlmo",
    "GPT2LMHeadModel": "gpt2:GPT2",
    "GemmaForCausalLM": "gemma:Gemma",
    "Gemma2ForCausalLM": "gemma:Gemma2",
    "Gemma3ForCausalLM": "gemma:Gemma3",
    "Gemma3nForCausalLM": "gemma3n:Gemma3n",
    "Gemma4ForCausalLM": "gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4:Gemma4Unified",
    "GlmForCausalLM": "glm:Glm",
    "Glm4ForCausalLM": "glm:Glm4",
    "Glm4MoeLiteForCausalLM": "deepseek:Glm4MoeLite",
    "Glm5NextForCausalLM": "glm5_next:Glm5Next",
    "GlmMoeDsaForCausalLM": "deepseek:GlmMoeDsa",
    "GraniteForCausalLM": "granite:Granite",
    "GraniteSWAForCausalLM": "granite:GraniteSWA",
    "GraniteMoeSWAForCausalLM": "granite_moe:GraniteMoeSWA",
    "HYV3ForCausalLM": "hy_v3:HYV3",
    "HYV4ForCausalLM": "hy_v4:HYV4",
    "HunYuanDenseV1ForCausalLM": "hunyuan:HunYuanDenseV1",
    "HyperCLOVAXForCausalLM": "hyperclovax:HyperCLOVAX",
    "Inkling2ForCausalLM": "inkling2:Inkling2",
    "InternLM3ForCausalLM": "llama:InternLM3",
    "Jais2ForCausalLM": "jais2:Jais2",
    "JambaForCausalLM": "jamba:Jamba",
    "KimiLinearForCausalLM": "kimi_linear:KimiLinear",
    "Kolibri1ForCausalLM": "kolibri1:Kolibri1",
    "LagunaForCausalLM": "laguna:Laguna",
    "Lfm2ForCausalLM": "lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "lfm2:Lfm2Moe",
    "Lfm3ForCausalLM": "lfm3:Lfm3",
    "LlamaForCausalLM": "llama:Llama",
    "Llama4ForCausalLM": "llama4:Llama4",
    "MambaForCausalLM": "mamba:Mamba",
    "Mamba2ForCausalLM": "mamba:Mamba2",
    "MellumForCausalLM": "mellum:Mellum",
    "MiniCPM3ForCausalLM": "minicpm3:MiniCPM3",
    "MiMoForCausalLM": "qwen2:MiMo",
    "MiMoV2FlashForCausalLM": "mimo_v2:MiMoV2",
    "MiMoV2ForCausalLM": "mimo_v2:MiMoV2",
    "MistralForCausalLM": "mistral:Mistral",
    "Mistral4ForCausalLM": "mistral4:Mistral4",
    "MistralLarge4ForCausalLM": "mistral_large4:MistralLarge4",
    "MinistralForCausalLM": "mistral:Ministral",
    "Ministral3ForCausalLM": "mistral:Ministral3",
    "NemotronHForCausalLM": "nemotron_h:NemotronH",
    "NemotronForCausalLM": "nemotron:Nemotron",
    "OPTForCausalLM": "opt:OPT",
    "Plamo2ForCausalLM": "plamo2:Plamo2",
    "Plamo3ForCausalLM": "plamo3:Plamo3",
    "OlmoHybridForCausalLM": "olmo_hybrid:OlmoHybrid",
    "Olmo2ForCausalLM": "olmo:Olmo2",
    "Olmo3ForCausalLM": "olmo:Olmo3",
    "Phi3ForCausalLM": "phi3:Phi3",
    "Qwen2ForCausalLM": "qwen2:Qwen2",
    "Qwen3ForCausalLM": "qwen3:Qwen3",
    "Qwen3NextForCausalLM": "qwen3_next:Qwen3Next",
    "Qwen3_5ForCausalLM": "qwen3_next:Qwen35",
    "Qwen3_5MoeForCausalLM": "qwen3_next:Qwen35Moe",
    "Qwen4ExpForCausalLM": "qwen4_exp:Qwen4Exp",
    "SeedOssForCausalLM": "seed_oss:SeedOss",
    "SolarOpenForCausalLM": "solar_open:SolarOpen",
    "SmolLM3ForCausalLM": "smollm3:SmolLM3",
    "Starcoder2ForCausalLM": "starcoder2:Starcoder2",
    "Step3p5ForCausalLM": "step3p5:Step3p5",
    "VaultGemmaForCausalLM": "vaultgemma:VaultGemma",
    "YoutuForCausalLM": "youtu:Youtu",
    "Zamba2ForCausalLM": "zamba2:Zamba2",
    "ZayaForCausalLM": "zaya:Zaya",
    "MixtralForCausalLM": "mixtral:Mixtral",
    "Qwen2MoeForCausalLM": "qwen_moe:Qwen2Moe",
    "Qwen3MoeForCausalLM": "qwen_moe:Qwen3Moe",
    "OlmoeForCausalLM": "olmoe:Olmoe",
    "GptOssForCausalLM": "gpt_oss:GptOss",
    "GraniteMoeForCausalLM": "granite_moe:GraniteMoe",
    "GraniteMoeHybridForCausalLM": "granite_moe:GraniteMoeHybrid",
    "GraniteMoeSharedForCausalLM": "granite_moe:GraniteMoeShared",
    "Glm4MoeForCausalLM": "glm4_moe:Glm4Moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe:Ernie45Moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan_moe:HunyuanMoe",
    "MiniMaxForCausalLM": "minimax_text:MiniMaxText",
    "MiniMaxM1ForCausalLM": "minimax_text:MiniMaxText",
    "MiniMaxText01ForCausalLM": "minimax_text:MiniMaxText",
    "MiniMaxM2ForCausalLM": "minimax_m2:MiniMaxM2",
    "MiniMaxM3VLForCausalLM": "minimax_m3:MiniMaxM3",
    "MuseGlimmerForCausalLM": "muse_glimmer:MuseGlimmer",
}
ENCODERS = {
    f"{prefix}{suffix}": cls
    for prefix, cls in (
        ("Bert", "bert:Bert"),
        ("Roberta", "bert:Roberta"),
        ("XLMRoberta", "bert:XLMRoberta"),
        ("ModernBert", "modernbert:ModernBert"),
        ("NomicBert", "nomic_bert:NomicBert"),
    )
    for suffix in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
ENCODERS["EmbeddingGemma2TextModel"] = "embedding_gemma2:EmbeddingGemma2"
# language models that come with an encoder only (`wrappers.py`)
WRAPPED = {
    "Glm4vForCausalLM": "glm:Glm4v",
    "Glm4vMoeForCausalLM": "glm4_moe:Glm4vMoe",
    "GlmOcrForCausalLM": "glm:GlmOcr",
    "GraniteDoclingForCausalLM": "granite:GraniteDocling",
    "InklingForCausalLM": "inkling:Inkling",
    "PaddleOCRVLForCausalLM": "qwen_vl:PaddleOCRVL",
    "Qwen2VLForCausalLM": "qwen_vl:Qwen2VL",
    "Qwen3VLForCausalLM": "qwen_vl:Qwen3VL",
    "Qwen3VLMoeForCausalLM": "qwen_vl:Qwen3VLMoe",
    "Qwen3_5VLForCausalLM": "qwen_vl:Qwen35VL",
    "Qwen3_5MoeVLForCausalLM": "qwen_vl:Qwen35MoeVL",
    "Qwen4ExpVLForCausalLM": "qwen4_exp:Qwen4ExpVL",
    "WhisperForCausalLM": "whisper:Whisper",
}
# names of decoders without an output head that do not follow from the others
BARE = {"Gemma3TextModel": "gemma:Gemma3", "JinaEmbeddingsV5Model": "qwen3:JinaEmbeddingsV5"}
# a decoder may also come without its output head (embedding models), or with a classifier in its place
MODELS = {
    name.replace("ForCausalLM", suffix): cls
    for suffix in ("ForCausalLM", "Model", "ForSequenceClassification")
    for name, cls in DECODERS.items()
} | (ENCODERS | WRAPPED | BARE)

# heads that draft for another model
DRAFTING = {"LlamaForCausalLMEagle3": "eagle3:LlamaEagle3"}

# architectures that are known, but not served -> why
REFUSED = {
    "DiffusionGemmaForBlockDiffusion": "it fills a block of tokens in several passes, and quire generates one by one",
    "InklingForCausalLM": "only files with its encoders, as published, are read",
    "KimiK3ForConditionalGeneration": "transformers has no implementation of it that ours could be compared with",
} | dict.fromkeys(DRAFTING, "it drafts for another model; serve that one with --speculative-config")


def model_class(architecture: str) -> type[CausalLM]:
    """Return the class for an architecture. Raises ValueError listing the supported architectures."""
    models = MODELS | DRAFTING
    if architecture not in models:
        known = ", ".join((*DECODERS, *ENCODERS, *WRAPPERS))
        raise ValueError(f"architecture not supported: {architecture}. Supported: {known}")
    module, name = models[architecture].split(":")
    return getattr(importlib.import_module(f"{_HERE}.{module}"), name)


def family_of(raw: dict[str, Any]) -> str:
    """Return the architecture of a parsed config.json or, of a wrapper, of its text part."""
    if wrapper := wrapper_of(raw):
        return text_architecture(wrapper, raw)
    names = raw.get("architectures") or []
    return next((name for name in names if name in MODELS), ", ".join(names) or "none named in config.json")


def read_model_spec(folder: str, implementation: str = "auto", *, images: bool = True) -> ModelSpec:
    """Read `folder/config.json`. `implementation` is `--model-impl`; auto: transformers if quire has no file for
    the architecture in config.json. Without `images` a wrapper's vision encoder is left out.

    Raises:
        ValueError: config.json is missing or unreadable, names no architecture that the implementation supports, or
        needs an unsupported feature.
    """
    raw = read_config(folder)
    with reading(Path(folder, "config.json"), raw):
        return _read_spec(folder, with_quantization(raw, folder), implementation, images)


def _read_spec(folder: str, raw: dict[str, Any], implementation: str, images: bool) -> ModelSpec:
    if refused := next((name for name in raw.get("architectures") or [] if name in REFUSED), None):
        raise ValueError(f"architecture {refused} is not supported: {REFUSED[refused]}")
    if implementation == "transformers" or (implementation == "auto" and _is_foreign(raw)):
        from quire.worker.models.fallback_spec import read_spec  # loads transformers

        spec = read_spec(folder, raw)
    else:
        spec = parse_model_spec(raw, images=images)
    if spec.tie_word_embeddings and has_own_head(folder):
        spec = replace(spec, tie_word_embeddings=False)
    return spec if spec.dtype else replace(spec, dtype=dtype_of_weights(folder))


def _is_foreign(raw: dict[str, Any]) -> bool:
    """Return whether config.json names architectures, but none that quire has a file for."""
    names = set(raw.get("architectures") or [])
    return bool(names) and not names & (MODELS.keys() | WRAPPERS.keys())


def parse_model_spec(raw: dict[str, Any], *, images: bool = True) -> ModelSpec:
    """Return the spec of a parsed config.json. `dtype` is "" if it names none. Raises ValueError as `read_model_spec`
    does.
    """
    architecture, wrapper = family_of(raw), wrapper_of(raw)
    spec = model_class(architecture).read_config(architecture, raw)
    tower = tower_class(wrapper) if wrapper and WRAPPERS[wrapper].describes_tower(raw) else None
    if tower is None:
        return spec
    if spec.crosses and not images:
        raise ValueError(f"--language-model-only: {wrapper} has no text without its encoder; omit it")
    vision = tower.read_spec(wrapper, raw) if images else None
    if vision and vision.mrope and not all(rope.axes for rope in spec.ropes.values()):
        raise ValueError("rope_parameters has no mrope_section, which images need: --language-model-only serves text")
    if WRAPPERS[wrapper].folder == "audio" and raw.get("tie_word_embeddings") is not None:
        spec = replace(spec, tie_word_embeddings=raw["tie_word_embeddings"])  # the head is the wrapper's
    return replace(spec, vision=vision, tower_prefixes=tower.prefixes)


def build_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    quantization: str | None = None,
    ops: Ops | None = None,
    weights: WeightFormat | None = None,
) -> CausalLM:
    """Build this rank's share of the model (`worker.parallel`) with uninitialised weights of `dtype` on `device`.

    `max_model_len` bounds the positions of the rotary tables; by default it is the spec's. With `quantization`
    (`layers/quantization/int_at_load.py`) the weights are quantized after they are loaded; a checkpoint may also hold
    them quantized; `weights` overrides both. `ops` are the platform's operations; the default is plain torch. Raises
    ValueError for an unknown architecture or weight format, and for sizes that the number of ranks does not divide.
    """
    import torch

    from quire.worker.host import torch_start
    from quire.worker.layers.linear import PLAIN_WEIGHTS
    from quire.worker.layers.quantization.checkpoint import checkpoint_format
    from quire.worker.layers.quantization.int_at_load import IntAtLoad

    if device.type == "meta" or spec.implementation == "transformers":
        torch_start.complete()  # it holds operations of the meta device
    if spec.implementation == "transformers" and spec.is_encoder:
        from quire.worker.models.fallback_whole import TransformersWhole as cls
    elif spec.implementation == "transformers":
        from quire.worker.models.fallback import TransformersLM as cls
    else:
        cls = model_class(spec.architecture)
    stored = checkpoint_format(spec.raw)
    if stored:
        heads = dict(spec.mtp.names) if spec.mtp and spec.has_head else {}
        stored.modules = TensorNames((getattr(cls, "renames", None) or {}) | heads).modules
    if quantization and stored:
        raise ValueError(f"--quantization {quantization}: the weights are quantized already; omit it")
    weights = weights or (IntAtLoad(quantization) if quantization else stored or PLAIN_WEIGHTS)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = cls(spec, max_model_len or spec.max_model_len, weights).eval()
            if spec.vision and model.model.first:
                _check_deepstack(spec.vision, model)
                model.vision = _build_tower(spec.vision, weights if quantization == "int8" else PLAIN_WEIGHTS).eval()
    finally:
        torch.set_default_dtype(default)
    if ops is not None:
        model.use(ops)
    return model


def _check_deepstack(vision: VisionSpec, model: CausalLM) -> None:
    """Raise ValueError if layers of a later stage, or the last layer, would need a part of the images' features."""
    needed, most = max(vision.deep, default=-1) + 1, len(model.model.layers) - model.model.last
    if needed > most:
        raise ValueError(
            f"the features of {len(vision.deep)} layers of the vision encoder join the first {needed} decoder layers "
            f"(deepstack), but only {most} of them can take them: lower --pipeline-parallel-size"
        )


def _build_tower(vision: VisionSpec, at_load: WeightFormat) -> VisionTower:
    """Build an encoder, whole on every rank, and in the model's dtype however the language model is stored.
    `--quantization int8` is for encoders of audio, too.
    """
    from quire.worker.parallel import Group, use_groups

    with use_groups(tp=Group(), pp=Group(), ep=Group()):
        weights = {"weights": at_load} if vision.audio else {}
        return tower_class(vision.architecture)(vision.config, **weights)


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of weights of the whole model, whatever stores them; tied embeddings count once. Builds the
    model without allocating memory.
    """
    import torch

    from quire.worker.layers.linear import PLAIN_WEIGHTS

    model = without_memory(spec, torch.float32, weights=PLAIN_WEIGHTS)
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: str | None = None, ops: Ops | None = None) -> int:
    """Return the bytes of the weights of the whole model once they are loaded for a platform's operations. Builds the
    model without allocating memory.
    """
    from quire.worker.layers.linear import Linear

    model = without_memory(spec, dtype, quantization, ops=ops)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    counted = {id(parameter) for linear in linears for parameter in linear.parameters(recurse=False)}
    others = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in counted)
    return others + sum(linear.method.num_bytes(linear) for linear in linears)


def encoder_bytes_per_embed(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes that one embedding of an image needs while it is encoded, estimated
    (`VisionTower.bytes_per_embed`).
    """
    return without_memory(spec, dtype).vision.bytes_per_embed()


def without_memory(
    spec: ModelSpec,
    dtype: torch.dtype,
    quantization: str | None = None,
    weights: WeightFormat | None = None,
    ops: Ops | None = None,
) -> CausalLM:
    """Build the whole model without allocating memory."""
    import torch

    from quire.worker.parallel import Group, use_groups

    with use_groups(tp=Group(), pp=Group(), ep=Group()):
        device = torch.device("meta")
        return build_model(spec, dtype, device, max_model_len=1, quantization=quantization, ops=ops, weights=weights)
