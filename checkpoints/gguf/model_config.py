"""The config.json of a GGUF file's model: its metadata in the keys of transformers. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quire.checkpoints.gguf.architectures import ARCHITECTURES, GgufArchitecture
from quire.checkpoints.gguf.defaults import metadata_of
from quire.checkpoints.gguf.encoders import pooling_method
from quire.checkpoints.gguf.header import GgufFile, stored_path
from quire.checkpoints.gguf.keys import check_types, refuse_unread, settle_ids
from quire.checkpoints.gguf.metadata import FULL, NORM_EPSILONS, Metadata
from quire.checkpoints.gguf.names import LONG_FACTORS, ROPE_FACTORS, row_names

# other contents of GGUF files, by general.type or general.architecture
_OTHER_CONTENTS = {
    "adapter": "a LoRA adapter",
    "mmproj": "an encoder of images (mmproj)",
    "clip": "an encoder of images (mmproj)",
    "imatrix": "an importance matrix",
}
_TENTHS = ("deepseek2", "deepseek32", "mistral4")
Factors = Mapping[str, list[float]]  # the values of the tensors ROPE_FACTORS and LONG_FACTORS that the file has


def model_config(file: GgufFile, factors: Factors) -> dict[str, Any]:
    """Return the config.json. Afterwards the file's metadata has the effective ids of special tokens.

    Raises:
        ValueError: the architecture or a setting is not supported, or a key is missing.
    """
    check_types(file.metadata, file.path)
    settle_ids(file.metadata, file.path)
    kind = file.metadata.get("general.architecture")
    if other := _OTHER_CONTENTS.get(file.metadata.get("general.type")) or _OTHER_CONTENTS.get(kind):
        raise ValueError(f"{file.path} is {other}, not a language model: give the model's own GGUF file")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: the architecture {kind!r} of GGUF files is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}. Give the original model in safetensors"
        )
    m, found = metadata_of(file), ARCHITECTURES[kind]
    own = found.settings(m)
    config = {key: read() for key, read in _sizes(m, found).items() if key not in own} | own
    if pooling_method(m) and "output.weight" not in file.tensors:  # a decoder for embeddings
        config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "Model")]
    if m.find("expert_count") and "num_experts" not in config:
        raise ValueError(f"{file.path}: experts in GGUF files of the architecture {kind} are not supported")
    if "rope_parameters" not in config:  # a family may have another default, so "default" is explicit
        config["rope_scaling"] = _rope_scaling(m, config, factors) or {"rope_type": "default"}
    names = found.tensor_names(file.tensors, config["num_hidden_layers"])
    types = {
        part: tensor.type for name, tensor in file.tensors.items() for part in row_names(names[name], found.fused_qkv)
    }
    refuse_unread(file.metadata, file.metadata.asked, config, file.path)
    config["quantization_config"] = {
        "quant_method": "gguf",
        "file": stored_path(file.path),
        "architecture": kind,
        "types": types,
    }
    for key, token in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token_id := file.metadata.get(f"tokenizer.ggml.{token}_token_id")) is not None:
            config[key] = token_id
    return config


def _sizes(m: Metadata, found: GgufArchitecture) -> dict[str, Callable[[], Any]]:
    """Return functions that read the keys that all architectures have."""

    def heads() -> int:
        return m.one("attention.head_count")

    def head_dim() -> int:
        return m.get("attention.key_length")

    def rotary() -> float:
        size = m.get("rope.dimension_count") or head_dim()
        return size / head_dim() if size < head_dim() else 1.0

    embedding = m.file.tensors.get("token_embd.weight")
    return {
        "architectures": lambda: [found.architecture],
        "model_type": lambda: found.model_type,
        "vocab_size": lambda: embedding.shape[0] if embedding else 0,
        "hidden_size": lambda: m.get("embedding_length"),
        "intermediate_size": lambda: m.one("feed_forward_length"),
        "num_hidden_layers": m.num_layers,
        "num_nextn_predict_layers": lambda: m.get("nextn_predict_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": lambda: m.one("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": lambda: m.get("context_length"),
        "rms_norm_eps": lambda: m.either(*NORM_EPSILONS),
        "rope_theta": lambda: m.get("rope.freq_base"),
        "partial_rotary_factor": rotary,
        "tie_word_embeddings": lambda: "output.weight" not in m.file.tensors,
        "torch_dtype": lambda: "bfloat16",
    }


def _rope_scaling(m: Metadata, config: dict[str, Any], factors: Factors) -> dict[str, Any] | None:
    if (values := factors.get(ROPE_FACTORS)) and any(factor != 1.0 for factor in values):
        return _llama3_scaling(config, values)
    if all(name in factors for name in LONG_FACTORS.values()):
        listed = {key: factors[name] for key, name in LONG_FACTORS.items()}
        return {"rope_type": "longrope", **listed, "attention_factor": m.get("rope.scaling.attn_factor") or 1.0}
    name = m.get("rope.scaling.type")
    factor = m.find("rope.scaling.factor") or m.find("rope.scale_linear") or 1.0
    if name == "none" or (name == "linear" and factor == 1.0):
        return None
    if name not in ("linear", "yarn"):
        raise ValueError(f"{m.kind}.rope.scaling.type {name!r} is not supported; supported: none, linear, yarn")
    return {"rope_type": name, "factor": factor} | (_yarn(m, factor) if name == "yarn" else {})


def _yarn(m: Metadata, factor: float) -> dict[str, Any]:
    scaling = {"original_max_position_embeddings": m.get("rope.scaling.original_context_length")}
    scale = (m.get("rope.scaling.attn_factor") or 1.0) * (m.find("rope.scaling.yarn_attn_factor") or 1.0)
    if scale != 1.0:  # for values that the type itself computes
        scaling["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
    for key in ("beta_fast", "beta_slow"):
        scaling[key] = m.get(f"rope.scaling.yarn_{key}")
    if m.kind == "gpt-oss":
        scaling["truncate"] = False
    # some store a tenth of it
    if scale := (m.find("rope.scaling.yarn_log_multiplier") or 0) * (10 if m.kind in _TENTHS else 1):
        scaling |= {"mscale": round(scale, 6), "mscale_all_dim": round(scale, 6)}
    if beta := m.get("attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = beta
    return scaling


def _llama3_scaling(config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """Return the settings of Llama 3 from which the divisors of the frequencies were computed."""
    dim, theta = 2 * len(factors), config["rope_theta"]
    if isinstance(theta, list):  # one per layer; only layers without a window are scaled
        theta = theta[config["layer_types"].index(FULL)]
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
