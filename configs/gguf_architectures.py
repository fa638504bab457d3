"""The architectures of GGUF files: what a config.json says beyond sizes, how their tensors are called, and what
llama.cpp's converter did to values, which the checkpoint reader undoes. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.configs.gguf import GgufFile
from quire.configs.gguf_names import POST, PRE, SANDWICH

Settings = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
_SIGMOID = 2  # expert_gating_func


class Metadata:
    """The metadata of a file, without the prefix of its architecture."""

    def __init__(self, file: GgufFile):
        self.file, self.kind = file, file.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `kind.key`. Raises ValueError if there is none, nor a default."""
        value = self.file.metadata.get(f"{self.kind}.{key}", default)
        if value is None:
            raise ValueError(f"{self.file.path}: the metadata has no {self.kind}.{key}")
        return value

    def find(self, key: str) -> Any:
        """The value, or None."""
        return self.file.metadata.get(f"{self.kind}.{key}")

    def one(self, key: str, default: Any = None) -> Any:
        """A value that files may have per layer, which must be the same for all layers with any."""
        value = self.get(key, default)
        if not isinstance(value, list):
            return value
        different = set(value) - {0}
        if len(different) > 1:
            raise ValueError(f"{self.file.path}: {self.kind}.{key} differs from layer to layer, which is not supported")
        return different.pop() if different else 0

    def has(self, tensor: str) -> bool:
        """Whether layer 0 has the tensor."""
        return f"blk.0.{tensor}" in self.file.tensors

    def window(self) -> int | None:
        return self.find("attention.sliding_window") or None

    def layer_types(self) -> list[str] | None:
        """The kinds of attention, if the file lists them."""
        pattern = self.find("attention.sliding_window_pattern")
        return [SLIDING if slides else FULL for slides in pattern] if isinstance(pattern, list) else None

    def listed_windows(self) -> Settings:
        """sliding_window and, if the file has them, layer_types."""
        kinds = self.layer_types()
        return {"sliding_window": self.window()} | ({"layer_types": kinds} if kinds else {})


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """`settings` are keys of config.json; `swapped`: rows of q and k are in the order of interleaved rotary pairs;
    `shifted`: norms are stored as 1 + w where safetensors have w.
    """

    architecture: str  # of config.json
    model_type: str
    settings: Callable[[Metadata], Settings] = lambda metadata: {}
    names: Mapping[str, str] = field(default_factory=lambda: PRE)
    swapped: bool = False
    shifted: bool = False


def _experts(m: Metadata, size_key: str = "moe_intermediate_size", **more: Any) -> Settings:
    size = m.find("expert_feed_forward_length") or m.one("feed_forward_length")
    numbers = {"num_experts": m.get("expert_count"), "num_experts_per_tok": m.get("expert_used_count")}
    return numbers | {size_key: size} | more


def _llama(m: Metadata) -> Settings:
    settings = {"attention_bias": True} if m.has("attn_q.bias") else {}
    if m.find("expert_count"):
        settings = _experts(m, "intermediate_size", architectures=["MixtralForCausalLM"], model_type="mixtral")
    return settings


def _mistral(m: Metadata) -> Settings:
    if m.find("attention.temperature_scale"):
        return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return {"sliding_window": None}


def _gemma2(m: Metadata) -> Settings:
    heads, hidden, dim = m.one("attention.head_count"), m.get("embedding_length"), m.get("attention.key_length")
    wide = m.get("block_count") == 46  # 27B, whose scale llama.cpp knows by its number of layers
    return {
        "sliding_window": m.get("attention.sliding_window"),
        "query_pre_attn_scalar": hidden // heads if wide else dim,
        "attn_logit_softcapping": m.find("attn_logit_softcapping"),
        "final_logit_softcapping": m.find("final_logit_softcapping"),
    }


def _gemma3(m: Metadata) -> Settings:
    heads, hidden, dim = m.one("attention.head_count"), m.get("embedding_length"), m.get("attention.key_length")
    wide = m.get("block_count") == 62
    return m.listed_windows() | {
        "query_pre_attn_scalar": hidden // heads if wide else dim,
        "rope_local_base_freq": m.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": m.find("final_logit_softcapping"),
    }


def _gemma4(m: Metadata) -> Settings:
    if m.find("expert_count"):
        raise ValueError(f"{m.file.path}: Gemma 4 with experts is not supported")
    kinds, sizes = m.layer_types(), m.get("feed_forward_length")
    sizes = sizes if isinstance(sizes, list) else [sizes]
    heads = m.get("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * len(kinds)
    local, wide = (heads[kinds.index(kind)] for kind in (SLIDING, FULL))
    full = kinds.index(FULL)
    dim, size = m.get("attention.key_length"), m.get("attention.key_length_swa")
    theta = m.get("rope.freq_base", 1000000.0)
    return m.listed_windows() | {
        "intermediate_size": min(sizes),
        "use_double_wide_mlp": max(sizes) > min(sizes),
        "num_key_value_heads": local,
        "num_global_key_value_heads": wide if wide != local else None,
        "head_dim": size,
        "global_head_dim": dim,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in m.file.tensors,
        "num_kv_shared_layers": m.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": m.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": _rows(m, "per_layer_token_embd.weight"),
        "final_logit_softcapping": m.find("final_logit_softcapping"),
        "partial_rotary_factor": 1.0,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": theta},
            SLIDING: {"rope_type": "default", "rope_theta": m.get("rope.freq_base_swa", 10000.0)},
        },
    }


def _rows(m: Metadata, name: str) -> int:
    tensor = m.file.tensors.get(name)
    return tensor.shape[0] if tensor else 0


def _cohere(m: Metadata) -> Settings:
    return {"logit_scale": m.get("logit_scale"), "use_qk_norm": m.has("attn_q_norm.weight")}


def _granite(m: Metadata) -> Settings:
    keys = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    embedding, residual, attention, logits = (m.find(key) for key in keys)
    dim = m.get("attention.key_length", m.get("embedding_length") // m.one("attention.head_count"))
    return {
        "attention_bias": m.has("attn_q.bias"),
        "embedding_multiplier": embedding or 1.0,
        "residual_multiplier": residual or 1.0,
        "attention_multiplier": attention or dim**-0.5,
        "logits_scaling": logits or 1.0,
    }


def _granite_moe(m: Metadata) -> Settings:
    if m.find("expert_shared_feed_forward_length"):
        raise ValueError(f"{m.file.path}: Granite with shared experts is not supported")
    return _granite(m) | _experts(m, "intermediate_size")


def _olmo2(m: Metadata) -> Settings:
    if m.window() is None:
        return {}
    return m.listed_windows() | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}


def _phi3(m: Metadata) -> Settings:
    return {"sliding_window": m.window()} | _original_length(m)


def _original_length(m: Metadata) -> Settings:
    length = m.find("rope.scaling.original_context_length")
    return {"original_max_position_embeddings": length} if length else {}


def _latent(m: Metadata) -> Settings:
    rope = m.get("rope.dimension_count")
    key, value = m.find("attention.key_length_mla"), m.find("attention.value_length_mla")
    key = key or m.get("attention.key_length")
    default = m.get("embedding_length") // m.one("attention.head_count")
    return {
        "q_lora_rank": m.find("attention.q_lora_rank"),
        "kv_lora_rank": m.get("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value or m.get("attention.value_length", default),
        "head_dim": None,
        "num_key_value_heads": m.one("attention.head_count"),
    }


def _deepseek(m: Metadata) -> Settings:
    return _experts(
        m,
        first_k_dense_replace=m.get("leading_dense_block_count", 0),
        n_shared_experts=m.get("expert_shared_count", 0),
        routed_scaling_factor=m.get("expert_weights_scale", 1.0),
    )


def _deepseek2(m: Metadata) -> Settings:
    settings = _latent(m) | _deepseek(m) | {"norm_topk_prob": m.get("expert_weights_norm", False)}
    groups, used = m.get("expert_group_count", 1), m.get("expert_group_used_count", 1)
    settings |= {"n_group": groups, "topk_group": used}
    if m.get("expert_gating_func", 1) == _SIGMOID:
        return settings | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return settings | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _glm4_moe(m: Metadata) -> Settings:
    return _deepseek(m) | {
        "attention_bias": m.has("attn_q.bias"),
        "use_qk_norm": m.has("attn_q_norm.weight"),
        "norm_topk_prob": m.get("expert_weights_norm", True),
        "n_group": m.get("expert_group_count", 1),
        "topk_group": m.get("expert_group_used_count", 1),
    }


def _ernie_moe(m: Metadata) -> Settings:
    return _experts(
        m,
        moe_num_shared_experts=m.get("expert_shared_count", 0),
        moe_layer_start_index=m.get("leading_dense_block_count", 1),
        moe_layer_interval=m.get("interleave_moe_layer_step", 1),
    )


def _hunyuan_moe(m: Metadata) -> Settings:
    return _experts(m, intermediate_size=m.get("expert_shared_feed_forward_length", m.one("feed_forward_length")))


def _qwen2_moe(m: Metadata) -> Settings:
    return _experts(m, shared_expert_intermediate_size=m.get("expert_shared_feed_forward_length"))


def _gpt_oss(m: Metadata) -> Settings:
    return _experts(m, "intermediate_size", sliding_window=m.window())


def _starcoder2(m: Metadata) -> Settings:
    return {"use_bias": m.has("attn_q.bias"), "sliding_window": m.window()}


def _attention_bias(m: Metadata) -> Settings:
    return {"attention_bias": m.has("attn_q.bias")}


def _nemotron(m: Metadata) -> Settings:
    return _attention_bias(m) | {"mlp_bias": m.has("ffn_up.bias")}


_FUSED_UP = {"ffn_up": "mlp.gate_up_proj"}
# general.architecture of GGUF files
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "arcee": GgufArchitecture("ArceeForCausalLM", "arcee", swapped=True),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", "cohere2", lambda m: _cohere(m) | m.listed_windows()),
    "command-r": GgufArchitecture("CohereForCausalLM", "cohere", _cohere),
    "deepseek": GgufArchitecture("DeepseekForCausalLM", "deepseek", _deepseek, swapped=True),
    "deepseek2": GgufArchitecture("DeepseekV2ForCausalLM", "deepseek_v2", _deepseek2),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", "ernie4_5", lambda m: {"use_bias": m.has("attn_q.bias")}),
    "ernie4_5-moe": GgufArchitecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ernie_moe),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", "exaone4", Metadata.listed_windows, POST),
    "gemma": GgufArchitecture("GemmaForCausalLM", "gemma", shifted=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", "gemma2", _gemma2, SANDWICH, shifted=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", "gemma3_text", _gemma3, SANDWICH, shifted=True),
    "gemma4": GgufArchitecture("Gemma4ForCausalLM", "gemma4_text", _gemma4, SANDWICH),
    "glm4": GgufArchitecture("Glm4ForCausalLM", "glm4", _attention_bias, SANDWICH | _FUSED_UP),
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", "gpt_oss", _gpt_oss),
    "gpt2": GgufArchitecture("GPT2LMHeadModel", "gpt2"),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", _granite, swapped=True),
    "granitemoe": GgufArchitecture("GraniteMoeForCausalLM", "granitemoe", _granite_moe, swapped=True),
    "hunyuan-dense": GgufArchitecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _attention_bias),
    "hunyuan-moe": GgufArchitecture("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _hunyuan_moe),
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", _llama, swapped=True),
    "minicpm3": GgufArchitecture("MiniCPM3ForCausalLM", "minicpm3", lambda m: _latent(m) | _original_length(m)),
    "minimax-m2": GgufArchitecture("MiniMaxM2ForCausalLM", "minimax_m2", lambda m: _experts(m, "intermediate_size")),
    "mistral3": GgufArchitecture("MistralForCausalLM", "mistral", _mistral, swapped=True),
    "nemotron": GgufArchitecture("NemotronForCausalLM", "nemotron", _nemotron, shifted=True),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", _olmo2, POST),
    "olmoe": GgufArchitecture(
        "OlmoeForCausalLM", "olmoe", lambda m: _experts(m, "intermediate_size", clip_qkv=m.find("attention.clamp_kqv"))
    ),
    "phi3": GgufArchitecture("Phi3ForCausalLM", "phi3", _phi3, PRE | _FUSED_UP),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", lambda m: _experts(m, norm_topk_prob=True)),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", "seed_oss", _attention_bias),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", _attention_bias, swapped=True),
    "starcoder2": GgufArchitecture("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
}
