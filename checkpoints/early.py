"""Checks of settings against config.json, by keys that mean the same in every family: a start that must fail does so
before any process begins. Torch-free. Families refuse more (`worker/limits.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.checkpoints.config_schema import TEXT_PARTS, unwrapped
from quire.checkpoints.ranks import share, share_kv_heads, too_many_stages
from quire.checkpoints.reading import read_object

_GENERATES = ("ForCausalLM", "ForConditionalGeneration")  # encoders keep some positions for themselves


def refuse_early(folder: str, tensor_parallel: int, pipeline_parallel: int, max_model_len: str) -> None:
    """Raise ValueError, naming the key or the setting, if the ranks cannot divide the model in `folder`, or its context
    is shorter than `max_model_len`.
    """
    raw = unwrapped(read_object(Path(folder, "config.json")))
    text = next((raw[key] for key in TEXT_PARTS if isinstance(raw.get(key), dict)), raw)
    if (heads := _count(text, "num_attention_heads")) is not None:
        share("num_attention_heads", heads, tensor_parallel)
    if (kv_heads := _count(text, "num_key_value_heads")) is not None:
        share_kv_heads(kv_heads, tensor_parallel)
    layers = _count(text, "num_hidden_layers")
    if layers is not None and pipeline_parallel > layers:
        raise ValueError(too_many_stages(pipeline_parallel, layers))
    most = _context(raw, text)
    if most is not None and max_model_len.isdigit() and int(max_model_len) > most:
        raise ValueError(longer_than_model(max_model_len, most))


def _context(raw: dict[str, Any], text: dict[str, Any]) -> int | None:
    """Return the longest context of a model that generates, unless scaled rotary embeddings stretch it."""
    names = raw.get("architectures")
    if not (isinstance(names, list) and names and str(names[0]).endswith(_GENERATES)):
        return None
    if text.get("rope_scaling") or "factor" in str(text.get("rope_parameters")):
        return None
    return _count(text, "max_position_embeddings")


def longer_than_model(asked: str, most: int, why: str = "") -> str:
    return f"--max-model-len {asked} is more than this model's {most} tokens{why}: set it to at most {most}, or auto"


def _count(raw: dict[str, Any], key: str) -> int | None:
    """Return the value of a key that is the same for all layers; None if it is missing or of another type."""
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
