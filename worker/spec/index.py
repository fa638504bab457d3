"""The index of sparse attention (`layers/sparse/chosen.py`): its keys in config.json, the layers that have one, and
its tensors. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.worker.spec.cache import IndexSizes
from quire.worker.spec.model import LayerSpec, ModelSpec

# keys of config.json, with defaults of DeepSeek V3.2
INDEX_DEFAULTS = {
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "indexer_types": None,
    "index_topk_pattern": None,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "indexer_rope_interleave": False,
    "index_rope_first": True,
    "index_eps": 1e-6,
    "index_kpool": 1,
}
_TYPES = {"F": "full", "S": "shared"}


def index_types(values: dict[str, Any]) -> list[str]:
    """Return "full" for each layer that chooses keys, "shared" for one that uses the choice of an earlier layer.

    Raises ValueError if `indexer_types` or `index_topk_pattern` do not fit.
    """
    number = values["num_hidden_layers"]
    types, pattern = values["indexer_types"], values["index_topk_pattern"]
    if types is None and pattern is not None:
        types = [_TYPES.get(one, one) for one in pattern]
    if types is None:
        every, offset = max(values["index_topk_freq"] or 1, 1), values["index_skip_topk_offset"]
        types = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(number)]
    if len(types) < number or set(types) - {"full", "shared"} or types[0] != "full":
        raise ValueError(f"indexer_types must name full or shared for each of {number} layers, full first")
    return list(types[:number])  # files may also list prediction heads


def with_index(layers: Sequence[LayerSpec], values: dict[str, Any], indexed: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """Give the layers that are `indexed` the index that `values` describe. Raises ValueError naming the key."""
    if not any(indexed):
        return tuple(layers)
    for key in ("index_topk", "index_n_heads", "index_head_dim", "index_kpool"):
        if not isinstance(values[key], int) or values[key] < 1:
            raise ValueError(f"{key} must be a positive integer, not {values[key]!r}")
    pool, top = values["index_kpool"], values["index_topk"]
    if top % pool:
        raise ValueError(f"index_topk {top} is not a multiple of index_kpool {pool}")
    sizes = IndexSizes(
        top,
        values["index_n_heads"],
        values["index_head_dim"],
        values["index_rope_first"],
        values["indexer_rope_interleave"],
        values["index_eps"],
        pool,
    )
    if values["qk_rope_head_dim"] > sizes.dim:
        raise ValueError(f"index_head_dim {sizes.dim} must be at least qk_rope_head_dim {values['qk_rope_head_dim']}")
    found, source = [], None
    for i, (layer, kind, has) in enumerate(zip(layers, index_types(values), indexed)):
        source = i if has and (kind == "full" or source is None) else source
        shared = has and kind == "shared"
        found.append(replace(layer, index=replace(sizes, source=source if shared else None)) if has else layer)
    return tuple(found)


def unread_indexes(spec: ModelSpec) -> tuple[str, ...]:
    """Return patterns of the tensors of indexes that the model does not have, as those of prediction heads."""
    if any(layer.compressed for layer in spec.layers):
        return ()
    own = [str(i) for i, layer in enumerate(spec.layers) if layer.index and layer.index.source is None]
    return (rf"^(?!(.*\.)?layers\.({'|'.join(own) or '-'})\.)(.*\.)?(indexer\.|self_attn\.index_)",)


def without_indexes(spec: ModelSpec, max_model_len: int = 0) -> ModelSpec:
    """Return the model without the indexes that choose all keys in contexts of up to `max_model_len` tokens."""
    layers = (_unindexed(one) if one.index and max_model_len <= one.index.top else one for one in spec.layers)
    return replace(spec, layers=tuple(layers))


def _unindexed(layer: LayerSpec) -> LayerSpec:
    mixer = "attention" if layer.mixer == "block_attention" else layer.mixer
    return replace(layer, index=None, mixer=mixer)
