"""The config.json of a GGUF file's model: its metadata in the keys of transformers. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.checkpoints.gguf.architectures import ARCHITECTURES, GgufArchitecture
from quire.checkpoints.gguf.defaults import metadata_of
from quire.checkpoints.gguf.encoders import pooling_method
from quire.checkpoints.gguf.header import GgufFile, stored_path
from quire.checkpoints.gguf.keys import check_types, refuse_unread, settle_ids
from quire.checkpoints.gguf.metadata import NORM_EPSILONS, Metadata
from quire.checkpoints.gguf.names import row_names
from quire.checkpoints.gguf.ropes import Factors, rope_scaling

# other contents of GGUF files, by general.type or general.architecture
_OTHER_CONTENTS = {
    "adapter": "a LoRA adapter",
    "mmproj": "an encoder of images (mmproj)",
    "clip": "an encoder of images (mmproj)",
    "imatrix": "an importance matrix",
}


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
        config["rope_scaling"] = rope_scaling(m, config, factors) or {"rope_type": "default"}
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
