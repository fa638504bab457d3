"""The architectures of GGUF files: keys of a config.json beyond sizes, names of tensors, and changes of values by
llama.cpp's converter, which the checkpoint reader undoes. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from quire.checkpoints.gguf import encoders as encoder
from quire.checkpoints.gguf import experts as mixture
from quire.checkpoints.gguf import settings as dense
from quire.checkpoints.gguf import states as recurrent
from quire.checkpoints.gguf.metadata import Metadata, Settings
from quire.checkpoints.gguf.names import AFTER, MIXED, POST, PRE, SANDWICH, tensor_name


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture. `settings`: keys of config.json. `of_states`: other names, in layers that have a tensor of the
    first. `swapped`: rows of q and k are in the order of interleaved rotary pairs. `shifted`: norms are stored as 1 + w
    where safetensors have w, those whose names end with a key of `offsets` as that number + w. `fused_qkv`: the decoder
    has one weight for q, k and v. `scaled_latents`: norms of latents include the factor that follows them.
    """

    architecture: str  # in config.json
    model_type: str
    settings: Callable[[Metadata], Settings] = lambda metadata: {}
    names: Mapping[str, str] = field(default_factory=lambda: PRE)
    of_states: Mapping[str, str] = field(default_factory=dict)
    swapped: bool = False
    shifted: bool = False
    offsets: Mapping[str, float] = field(default_factory=dict)
    fused_qkv: bool = False
    scaled_latents: bool = False

    def tensor_names(self, tensors: Collection[str], num_layers: int) -> dict[str, str]:
        """Return the decoder's name of each tensor of a file, by its name in the file."""
        marker = f".{next(iter(self.of_states))}.weight" if self.of_states else None
        layers = [name.removesuffix(marker) + "." for name in tensors if name.endswith(marker)] if marker else []
        with_states, both = tuple(layers), self.names | self.of_states
        return {
            name: tensor_name(name, both if name.startswith(with_states) else self.names, num_layers)
            for name in tensors
        }


_FUSED_UP = {"ffn_up": "mlp.gate_up_proj"}
# general.architecture of GGUF files
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "afmoe": GgufArchitecture("AfmoeForCausalLM", "afmoe", mixture.afmoe, SANDWICH | {"attn_gate": "self_attn.g_proj"}),
    "arcee": GgufArchitecture("ArceeForCausalLM", "arcee", swapped=True),
    "bailingmoe3": GgufArchitecture("BailingHybridForCausalLM", "bailing_hybrid", recurrent.bailing3, recurrent.LING),
    "bert": GgufArchitecture("BertModel", "bert", encoder.bert, AFTER),
    "chatglm": GgufArchitecture("GlmForCausalLM", "glm", dense.attention_bias, PRE | _FUSED_UP),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", "cohere2", lambda m: dense.cohere(m) | m.listed_windows()),
    "command-r": GgufArchitecture("CohereForCausalLM", "cohere", dense.cohere),
    "deepseek": GgufArchitecture("DeepseekForCausalLM", "deepseek", mixture.deepseek, swapped=True),
    "deepseek2": GgufArchitecture("DeepseekV2ForCausalLM", "deepseek_v2", mixture.deepseek2),
    "deepseek2-ocr": GgufArchitecture("DeepseekForCausalLM", "deepseek", mixture.deepseek),
    "deepseek32": GgufArchitecture("DeepseekV32ForCausalLM", "deepseek_v32", mixture.indexed),
    "dots1": GgufArchitecture("Dots1ForCausalLM", "dots1", mixture.dots1),
    "dots3note": GgufArchitecture(
        "Dots3NoteForCausalLM", "dots3_note_text", mixture.dots3, mixture.DOTS3, scaled_latents=True
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", "ernie4_5", lambda m: {"use_bias": m.has_bias()}),
    "ernie4_5-moe": GgufArchitecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", mixture.ernie_moe),
    "exaone-moe": GgufArchitecture("ExaoneMoeForCausalLM", "exaone_moe", mixture.exaone_moe),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", "exaone4", dense.exaone4, POST),
    "falcon-h1": GgufArchitecture("FalconH1ForCausalLM", "falcon_h1", recurrent.falcon_h1, recurrent.MAMBA2),
    "gemma": GgufArchitecture("GemmaForCausalLM", "gemma", shifted=True),
    "gemma-embedding": GgufArchitecture("Gemma3TextModel", "gemma3_text", encoder.gemma, SANDWICH, shifted=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", "gemma2", dense.gemma2, SANDWICH, shifted=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", "gemma3_text", dense.gemma3, SANDWICH, shifted=True),
    "gemma3n": GgufArchitecture("Gemma3nForCausalLM", "gemma3n_text", dense.gemma3n, SANDWICH),
    "gemma4": GgufArchitecture("Gemma4ForCausalLM", "gemma4_text", mixture.gemma4, MIXED),
    "glm5-next": GgufArchitecture("Glm5NextForCausalLM", "glm5_next_text", recurrent.glm5_next, recurrent.GLM5_NEXT),
    "glm-dsa": GgufArchitecture("GlmMoeDsaForCausalLM", "glm_moe_dsa", mixture.glm_dsa),
    "glm4": GgufArchitecture("Glm4ForCausalLM", "glm4", dense.attention_bias, SANDWICH | _FUSED_UP),
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", "glm4_moe", mixture.glm4_moe),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", "gpt_oss", mixture.gpt_oss),
    "gpt2": GgufArchitecture("GPT2LMHeadModel", "gpt2", fused_qkv=True),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", dense.granite, swapped=True),
    "granite_swa": GgufArchitecture("GraniteSWAForCausalLM", "granite_swa", dense.granite_swa, swapped=True),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", recurrent.granite_hybrid, recurrent.MAMBA2, swapped=True
    ),
    "granitemoe": GgufArchitecture("GraniteMoeForCausalLM", "granitemoe", mixture.granite_moe, swapped=True),
    "hunyuan-dense": GgufArchitecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", dense.attention_bias),
    "hunyuan-moe": GgufArchitecture("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", mixture.hunyuan_moe),
    "hy_v3": GgufArchitecture("HYV3ForCausalLM", "hy_v3", mixture.hy_v3),
    "hy_v4": GgufArchitecture("HYV4ForCausalLM", "hy_v4", mixture.hy_v4, mixture.HY_V4),
    "jais2": GgufArchitecture("Jais2ForCausalLM", "jais2", dense.nemotron),
    "jamba": GgufArchitecture("JambaForCausalLM", "jamba", recurrent.jamba, recurrent.MAMBA1),
    "kimi-linear": GgufArchitecture("KimiLinearForCausalLM", "kimi_linear", recurrent.kimi_linear, recurrent.KIMI),
    "laguna": GgufArchitecture("LagunaForCausalLM", "laguna", mixture.laguna, mixture.GATED),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM", "lfm2", recurrent.lfm2, recurrent.SHORT_CONV),
    "lfm2moe": GgufArchitecture("Lfm2MoeForCausalLM", "lfm2_moe", recurrent.lfm2_moe, recurrent.SHORT_CONV),
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", mixture.llama, swapped=True),
    "llama4": GgufArchitecture("Llama4ForCausalLM", "llama4_text", mixture.llama4),
    "mamba": GgufArchitecture("MambaForCausalLM", "mamba", recurrent.mamba, recurrent.MAMBA1),
    "mamba2": GgufArchitecture("Mamba2ForCausalLM", "mamba2", recurrent.mamba2, recurrent.MAMBA2),
    "mellum": GgufArchitecture("MellumForCausalLM", "mellum", mixture.mellum),
    "mimo2": GgufArchitecture("MiMoV2FlashForCausalLM", "mimo_v2_flash", mixture.mimo2),
    "minicpm3": GgufArchitecture(
        "MiniCPM3ForCausalLM", "minicpm3", lambda m: dense.latent(m) | dense.original_length(m)
    ),
    "minimax-01": GgufArchitecture(
        "MiniMaxText01ForCausalLM", "minimax", recurrent.minimax, of_states=recurrent.MINIMAX_STATES, fused_qkv=True
    ),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2ForCausalLM", "minimax_m2", lambda m: mixture.experts(m, "intermediate_size")
    ),
    "mistral3": GgufArchitecture("MistralForCausalLM", "mistral", dense.mistral, swapped=True),
    "mistral4": GgufArchitecture("Mistral4ForCausalLM", "mistral4", mixture.deepseek_v3),
    "modern-bert": GgufArchitecture(
        "ModernBertModel", "modernbert", encoder.modern_bert, PRE | _FUSED_UP, fused_qkv=True
    ),
    "nemotron": GgufArchitecture("NemotronForCausalLM", "nemotron", dense.nemotron, shifted=True),
    "nemotron_h": GgufArchitecture("NemotronHForCausalLM", "nemotron_h", recurrent.nemotron_h, recurrent.NEMOTRON),
    "nemotron_h_moe": GgufArchitecture("NemotronHForCausalLM", "nemotron_h", recurrent.nemotron_h, recurrent.NEMOTRON),
    "nomic-bert": GgufArchitecture("NomicBertModel", "nomic_bert", encoder.nomic_bert, AFTER, fused_qkv=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", dense.olmo2, POST),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", "olmoe", mixture.olmoe),
    "phi3": GgufArchitecture("Phi3ForCausalLM", "phi3", dense.phi3, PRE | _FUSED_UP, fused_qkv=True),
    "plamo2": GgufArchitecture(
        "Plamo2ForCausalLM",
        "plamo2",
        recurrent.plamo2,
        recurrent.PLAMO2,
        shifted=True,
        offsets=recurrent.PLAMO_OFFSETS | {"q_norm": 0.0, "k_norm": 0.0},
        fused_qkv=True,
    ),
    "plamo3": GgufArchitecture(
        "Plamo3ForCausalLM",
        "plamo3",
        recurrent.plamo3,
        recurrent.PLAMO,
        shifted=True,
        offsets=recurrent.PLAMO_OFFSETS,
        fused_qkv=True,
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM", "qwen2_moe", mixture.qwen2_moe),
    # positions of text are the same in all of its parts
    "qwen2vl": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "qwen35": GgufArchitecture("Qwen3_5ForCausalLM", "qwen3_5_text", recurrent.qwen35, recurrent.DELTA, shifted=True),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", recurrent.qwen35_moe, recurrent.DELTA, shifted=True
    ),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", mixture.qwen3_moe),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM", "qwen3_next", recurrent.qwen3_next, recurrent.NEXT, shifted=True
    ),
    "qwen3vl": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", mixture.qwen3_moe),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", "seed_oss", dense.attention_bias),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", dense.attention_bias, swapped=True),
    "step35": GgufArchitecture("Step3p5ForCausalLM", "step3p5", mixture.step35, mixture.GATED, shifted=True),
    "starcoder2": GgufArchitecture("Starcoder2ForCausalLM", "starcoder2", dense.starcoder2),
}
