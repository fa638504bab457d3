"""Cases of GGUF files of newer families, as `tests/checkpoints/test_gguf_families.py` has them: the architecture,
changed settings of the checkpoint, and further keys of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.helpers.models.gguf_converter import experts

Config = dict[str, Any]
_SIZES = {"hidden_size": 64, "intermediate_size": 96}
_WIDE = _SIZES | {"moe_intermediate_size": 64}
_BY_KIND = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
_BY_KIND["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}


def _afmoe(c: Config) -> Config:
    more = {"expert_weights_norm": True, "expert_weights_scale": c["route_scale"]}
    return experts(c) | more | {"leading_dense_block_count": c["num_dense_layers"]}


def _mellum(c: Config) -> Config:
    flags = [kind == "sliding_attention" for kind in c["layer_types"]]
    return experts(c) | {"attention.sliding_window_pattern": flags, "rope.freq_base_swa": 1e4}


def _mimo2(c: Config) -> Config:
    flags = [kind == "sliding_attention" for kind in c["layer_types"]]
    heads = [2 * c["num_key_value_heads"] if slides else c["num_key_value_heads"] for slides in flags]
    groups = {"expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]}
    attention = {"attention.head_count_kv": heads, "attention.value_length": c["v_head_dim"]}
    return (
        experts(c)
        | groups
        | attention
        | {"attention.sliding_window_pattern": flags, "rope.freq_base_swa": 1e4, "attention.value_scale": 0.707}
    )


NEWER_CASES: dict[str, tuple[str, Config, Callable[[Config], Config]]] = {
    "afmoe": ("afmoe", _WIDE | {"global_attn_every_n_layers": 4}, _afmoe),
    "dots1": (
        "dots1",
        _WIDE | {"sliding_window": None, "max_window_layers": 4, "n_group": 1, "topk_group": 1},
        lambda c: experts(c) | {"expert_weights_norm": True},
    ),
    "jais2": ("jais2", _SIZES, lambda c: {}),
    "mellum": ("mellum", _WIDE | {"rope_parameters": _BY_KIND, "mlp_layer_types": ["sparse"] * 4}, _mellum),
    "mimo_v2": ("mimo2", _WIDE | {"v_head_dim": 16, "head_dim": 32}, _mimo2),
    "seed_oss": ("seed_oss", _SIZES, lambda c: {}),
}
