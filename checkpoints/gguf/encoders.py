"""Settings of config.json from the metadata of GGUF files: encoders, and the pooling of hidden states. Torch-free."""

from __future__ import annotations

from typing import Any

from quire.checkpoints.gguf.metadata import NORM_EPSILONS, Metadata, Settings
from quire.checkpoints.gguf.settings import gemma3

_METHODS = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type
_NONE, _RANK = 0, 4


def bert(m: Metadata) -> Settings:
    positions = m.rows("position_embd.weight")
    if not positions:
        raise ValueError(f"{m.file.path}: BERT without position_embd.weight is not supported")
    sizes = {"max_position_embeddings": positions, "type_vocab_size": m.rows("token_types.weight")}
    return _encoder(m) | sizes | {"hidden_act": "gelu"} | _classifier(m, "Bert")


def nomic_bert(m: Metadata) -> Settings:
    return _encoder(m) | {
        "type_vocab_size": m.rows("token_types.weight"),
        "rope_theta": m.get("rope.freq_base"),
        "qkv_proj_bias": m.has("attn_qkv.bias"),
        "mlp_fc1_bias": m.has("ffn_up.bias"),
        "mlp_fc2_bias": m.has("ffn_down.bias"),
    }


def modern_bert(m: Metadata) -> Settings:
    settings = _encoder(m) | {
        "hidden_activation": m.get("hidden_activation"),
        "local_attention": m.window() or 0,
        "global_attn_every_n_layers": _period(m) if m.window() else 1,
        "global_rope_theta": m.get("rope.freq_base"),
        "local_rope_theta": m.get("rope.freq_base_swa"),
        "norm_bias": "output_norm.bias" in m.file.tensors,
        "attention_bias": m.has("attn_qkv.bias"),
        "mlp_bias": m.has("ffn_up.bias"),
    }
    method = _METHODS.get(m.get("classifier.pooling_type"), "mean")
    return settings | _classifier(m, "ModernBert", classifier_pooling=method)


def _period(m: Metadata) -> int:
    """Return the frequency of the layers with full attention; layer 0 is the first."""
    pattern = m.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return pattern
    period = next((i for i, slides in enumerate(pattern) if i and not slides), len(pattern))
    if [bool(slides) for slides in pattern] != [i % period > 0 for i in range(len(pattern))]:
        raise ValueError(f"{m.file.path}: {m.kind}.attention.sliding_window_pattern must repeat itself")
    return period


def gemma(m: Metadata) -> Settings:
    scalar = m.query_scalar(m.get("attention.key_length"))
    return gemma3(m) | {"use_bidirectional_attention": True, "query_pre_attn_scalar": scalar}


def _encoder(m: Metadata) -> Settings:
    return {"layer_norm_eps": m.either(*NORM_EPSILONS[::-1]), "num_key_value_heads": None, "head_dim": None}


def _classifier(m: Metadata, prefix: str, **settings: Any) -> Settings:
    """Return the settings of a classifier; none if the file has no logits."""
    count = m.rows("cls.output.weight")
    if not count:
        return {}
    if not m.rows("cls.weight"):
        raise ValueError(
            f"{m.file.path}: the classifier's layer before its output (cls.weight) is missing: llama.cpp's converter "
            "drops the pooler of BERT. Give the original model in safetensors"
        )
    names = m.find("classifier.output_labels") or [f"LABEL_{i}" for i in range(count)]
    return settings | {
        "architectures": [f"{prefix}ForSequenceClassification"],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "classifier_bias": "cls.bias" in m.file.tensors,
    }


def pooling_method(m: Metadata) -> str | None:
    """Return the pooling method of hidden states, or None if the file does not say.

    Raises:
        ValueError: the method is not supported.
    """
    kind = m.get("pooling_type")
    if kind == _NONE:
        return None
    if kind == _RANK and m.rows("cls.output.weight") and m.find("attention.causal") is False:
        return None  # the architecture of a classifier implies it
    if kind not in _METHODS:
        raise ValueError(f"{m.file.path}: {m.kind}.pooling_type {kind} is not supported; supported: 1, 2, 3")
    return _METHODS[kind]
