"""What config.json of a GGUF file's model would say: its metadata in the keys of transformers, and the names of its
tensors. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from quire.configs.gguf import GgufFile

# general.architecture -> (architecture of config.json, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"


def tensor_name(name: str) -> str:
    """The name in safetensors checkpoints of a GGUF tensor, or `name` itself if it has none."""
    base, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", base):
        if match[2] in _LAYER_TENSORS:
            return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.{kind}"
    elif base in _MODEL_TENSORS:
        return f"{_MODEL_TENSORS[base]}.{kind}"
    return name


def swapped_heads(config: Mapping[str, Any], name: str) -> int | None:
    """The number of heads of a tensor whose rows the file holds in the order of interleaved rotary pairs (q and k of
    the architecture llama), else None.
    """
    if config["model_type"] != "llama":
        return None
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else None


def model_config(file: GgufFile, rope_factors: list[float] | None) -> dict[str, Any]:
    """The config.json. `rope_factors` are the values of the tensor ROPE_FACTORS, if the file has it.

    Raises:
        ValueError: the architecture or a setting is not supported, or a key is missing.
    """
    metadata = file.metadata
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: the architecture {kind!r} of GGUF files is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}. Give the original model in safetensors"
        )

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{key}", default)
        if value is None:
            raise ValueError(f"{file.path}: the metadata has no {kind}.{key}")
        return value

    architecture, model_type = ARCHITECTURES[kind]
    heads = get("attention.head_count")
    if get("expert_count", 0):
        raise ValueError(f"{file.path}: experts in GGUF files are not supported yet; give the model in safetensors")
    types = {tensor_name(name): tensor.type for name, tensor in file.tensors.items()}
    bias = "model.layers.0.self_attn.q_proj.bias" in types
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", get("embedding_length") // heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in types,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf", "file": str(file.path.resolve()), "types": types},
    }
    if bias and model_type == "llama":
        config["attention_bias"] = True
    if scaling := _rope_scaling(metadata, kind, config, rope_factors):
        config["rope_scaling"] = scaling
    for key, token in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{token}_token_id")) is not None:
            config[key] = token_id
    return config


def _rope_scaling(
    metadata: Mapping[str, Any], kind: str, config: dict[str, Any], factors: list[float] | None
) -> dict[str, Any] | None:
    if factors and any(factor != 1.0 for factor in factors):
        return _llama3_scaling(config, factors)
    name = metadata.get(f"{kind}.rope.scaling.type", "none")
    if name == "none":
        return None
    if name not in ("linear", "yarn"):
        raise ValueError(f"{kind}.rope.scaling.type {name!r} is not supported; supported: none, linear, yarn")
    scaling = {"rope_type": name, "factor": metadata.get(f"{kind}.rope.scaling.factor", 1.0)}
    if original := metadata.get(f"{kind}.rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """The settings of Llama 3 from which the divisors of the frequencies were computed."""
    dim, theta = 2 * len(factors), config["rope_theta"]
    largest = max(factors)
    for original in (8192, 256, 4096, 16384, 32768):
        scaling = {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        found = [_llama3_factor(theta ** (-2 * i / dim), original, **scaling) for i in range(len(factors))]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, factors)):
            return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}
    raise ValueError(f"the tensor {ROPE_FACTORS} has factors that are not those of Llama 3, which is not supported")


def _llama3_factor(
    frequency: float, original: int, factor: float, low_freq_factor: float, high_freq_factor: float
) -> float:
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high_freq_factor:
        return 1.0
    if wavelength > original / low_freq_factor:
        return factor
    smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return 1 / ((1 - smooth) / factor + smooth)
