"""GGUF files of families with a gate on the attended values (Laguna, dots3, HY-V4), written by llama.cpp's rules, give
the logits of the checkpoints that they were made of. The `gguf` package does not know their names yet.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire.checkpoints.gguf.folder import gguf_folder
from quire.checkpoints.gguf.header import read_gguf
from quire.checkpoints.gguf.model_config import model_config
from quire.worker.models.registry import parse_model_spec
from tests.checkpoints.test_gguf_states import COMMON, IDS, write
from tests.helpers.models.families import FAMILIES, build_family
from tests.worker.layers.test_stored_weights import load, logits_of

Config = dict[str, Any]
SHARED = {
    f"mlp.{place}.{name}_proj.weight": f"ffn_{name}_shexp.weight"
    for place in ("shared_expert", "shared_experts")
    for name in ("gate", "up", "down")
}
CORRECTED = {f"mlp.{place}.e_score_correction_bias": "exp_probs_b.bias" for place in ("gate", "experts")}
LAGUNA = COMMON | SHARED | CORRECTED
LAGUNA |= {f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in "qk"}
LAGUNA["self_attn.g_proj.weight"] = "attn_gate.weight"
LATENT = COMMON | SHARED | CORRECTED
LATENT |= {
    **{f"self_attn.q_{part}_proj.weight": f"attn_q_{part}.weight" for part in "ab"},
    **{f"self_attn.{part}_a_layernorm.weight": f"attn_{part}_a_norm.weight" for part in ("q", "kv")},
    **{f"self_attn.{part}_b": f"attn_{part}_b.weight" for part in "kv"},
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
}
DOTS3 = LATENT | {
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.k_rope_only_layernorm.weight": "attn_k_norm.weight",
    # of the layer that drafts
    "embed_tokens.weight": "nextn.embed_tokens.weight",
    **{f"{name}.weight": f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
}
HY_V4 = LATENT | {
    "self_attn.linear_gate.weight": "attn_gate.weight",
    "self_attn.learnable_sink_param": "attn_sinks.weight",
    **{f"model.hc_pre.hc_head.hc_head_{name}": f"output_hc_{name}.weight" for name in ("fn", "base", "scale")},
    **{
        f"hc_pre.hc_{half}_layer.hc_{name}": f"hc_{place}_{name}.weight"
        for half, place in (("attn", "attn"), ("mlp", "ffn"))
        for name in ("fn", "base", "scale")
    },
}
# other sizes than those of `FAMILIES`, which files do not have
DOTS3_SIZES = {"n_group": 1, "topk_group": 1, "swa_q_lora_rank": 24, "swa_qk_nope_head_dim": 24, "n_shared_experts": 1}
DOTS3_SIZES |= {"shared_experts_intermediate_size": 16}
_FULL_FIRST = ["full_attention", *["sliding_attention"] * 3]
_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 64}
_YARN |= {"beta_slow": 1.0, "beta_fast": 64.0, "attention_factor": 1.3465735902799727, "partial_rotary_factor": 0.5}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
YARN = {"full_attention": _YARN, "sliding_attention": _LOCAL}


def _laguna(c: Config) -> Config:
    full, local = (c["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    keys = {
        "attention.head_count": c["num_attention_heads_per_layer"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": local["rope_theta"],
        "rope.dimension_count": int(c["head_dim"] * full["partial_rotary_factor"]),
        "rope.dimension_count_swa": int(c["head_dim"] * local["partial_rotary_factor"]),
        "expert_count": c["num_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c["shared_expert_intermediate_size"],
        "expert_weights_norm": True,
        "expert_weights_scale": c["moe_routed_scaling_factor"],
        "expert_gating_func": 2,
        "leading_dense_block_count": c["mlp_layer_types"].count("dense"),
    }
    if full["rope_type"] == "yarn":
        scaling = {"type": "yarn", "factor": full["factor"], "yarn_attn_factor": full["attention_factor"]}
        scaling |= {f"yarn_{key}": full[key] for key in ("beta_fast", "beta_slow")}
        scaling["original_context_length"] = full["original_max_position_embeddings"]
        keys |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return keys | ({"attention.sliding_window": c["sliding_window"]} if "sliding_attention" in c["layer_types"] else {})


def _latent(c: Config) -> Config:
    key = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
        "attention.value_length": c["kv_lora_rank"],
        "attention.key_length_mla": key,
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": c["qk_rope_head_dim"],
        "attention.indexer.head_count": c["index_n_heads"],
        "attention.indexer.key_length": c["index_head_dim"],
        "attention.indexer.top_k": c["index_topk"],
        "leading_dense_block_count": 1,
        "expert_count": c["n_routed_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": float(c["routed_scaling_factor"]),
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }


def _dots3(c: Config) -> Config:
    own = FAMILIES["dots3_note"][1] | DOTS3_SIZES
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    rank, rope = own["swa_kv_lora_rank"], c["qk_rope_head_dim"]
    return _latent(c) | {
        # the last layer drafts, and is like those with a window
        "block_count": len(slides) + 1,
        "nextn_predict_layers": 1,
        "attention.head_count": [own[f"{'swa_' if one else ''}num_attention_heads"] for one in (*slides, True)],
        "attention.sliding_window": own["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.indexer.types": [not one for one in slides],
        "attention.kv_lora_rank_swa": rank,
        "attention.key_length_swa": rank + rope,
        "attention.value_length_swa": rank,
        "attention.key_length_mla_swa": own["swa_qk_nope_head_dim"] + rope,
        "attention.value_length_mla_swa": own["swa_v_head_dim"],
        "rope.freq_base": 8e7,
        "rope.freq_base_swa": 5e4,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    }


def _hy_v4(c: Config) -> Config:
    return _latent(c) | {
        "rope.freq_base": c["rope_parameters"]["rope_theta"],
        "attention.indexer.types": [kind == "full" for kind in c["indexer_types"]],
        "swiglu_clamp_exp": [c["swiglu_limit"]] * c["num_hidden_layers"],
        "hyper_connection.count": c["hc_mult"],
        "hyper_connection.epsilon": c["hc_eps"],
        "hyper_connection.magnitude": c["hc_magnitude"],
    }


# name of a checkpoint -> (architecture of GGUF files, other settings, keys, names)
CASES: dict[str, tuple[str, Config, Callable[[Config], Config], dict[str, str]]] = {
    "laguna": ("laguna", {"layer_types": _FULL_FIRST}, _laguna, LAGUNA),
    "laguna-entries": ("laguna", {"layer_types": ["full_attention"] * 4}, _laguna, LAGUNA),
    "dots3_note": ("dots3note", DOTS3_SIZES, _dots3, DOTS3),
    "hy_v4": ("hy_v4", {}, _hy_v4, HY_V4),
}


def _latents(name: str, c: Config) -> tuple[int, int, int]:
    """The heads of a layer, and of each the entries of a key that do not rotate and those of a value."""
    layer = int(name.split(".")[2])
    if c["model_type"] == "dots3_note_text" and [*c["layer_types"], "sliding_attention"][layer] == "sliding_attention":
        own = FAMILIES["dots3_note"][1] | DOTS3_SIZES
        return own["swa_num_attention_heads"], own["swa_qk_nope_head_dim"], own["swa_v_head_dim"]
    return c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]


def _tensors(folder: str, c: Config) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by the names of the cases, experts together, of latent keys and values two."""
    weights, found, experts = load_file(Path(folder, "model.safetensors")), {}, defaultdict(list)
    scaled = c["model_type"] == "dots3_note_text"
    if scaled:
        weights |= _drafting(weights, c)
    for name, value in sorted(weights.items()):
        value = value.float()
        if match := re.fullmatch(r"(.*\.experts)\.\d+(\..*)", name):
            experts[match[1] + match[2]].append(value)
        elif name.endswith(".experts.gate_up_proj"):
            for half, part in zip(("gate", "up"), value.chunk(2, 1)):
                found[name.replace("gate_up_proj", f"{half}_proj.weight")] = part
        elif name.endswith(".experts.down_proj"):
            found[f"{name}.weight"] = value
        elif name.endswith("kv_b_proj.weight"):
            heads, nope, size = _latents(name, c)
            keys, values = value.unflatten(0, (heads, nope + size)).split([nope, size], 1)
            found[name.replace("kv_b_proj.weight", "k_b")] = keys.transpose(1, 2)
            found[name.replace("kv_b_proj.weight", "v_b")] = values
        elif scaled and re.search(r"\.(q|kv)_a_layernorm\.weight$", name):
            found[name] = value * (c["hidden_size"] / len(value)) ** 0.5
        else:
            found[name] = value
    found |= {name: torch.stack(values) for name, values in experts.items()}
    return {name: value.contiguous().numpy() for name, value in found.items()}


def _drafting(weights: dict[str, torch.Tensor], c: Config) -> dict[str, torch.Tensor]:
    """The tensors of a layer that drafts: the attention of a layer with a window, and a dense MLP."""
    last, size = f"model.layers.{c['num_hidden_layers']}", c["hidden_size"]
    found = {f"{last}.eh_proj.weight": torch.zeros(size, 2 * size)}
    found |= {f"{last}.{name}.weight": torch.zeros(size) for name in ("enorm", "hnorm")}
    found[f"{last}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    for source, part in (("model.layers.1", r"self_attn\.|\w+_layernorm"), ("model.layers.0", r"mlp\.")):
        for name, value in weights.items():
            if re.match(rf"{re.escape(source)}\.({part})", name):
                found[name.replace(source, last)] = value
    return found


def build(name: str, tmp_path: Path, settings: Config | None = None, **changes: Any) -> tuple[str, Path]:
    """The checkpoint, and the file made of it with `changes` of its keys."""
    kind, usual, keys, names = CASES[name]
    source = build_family(name, tmp_path / "source", **usual | (settings or {}))
    config = json.loads(Path(source, "config.json").read_text())
    written = {key: value for key, value in (keys(config) | changes).items() if value is not None}
    write(tmp_path / "model.gguf", kind, written, names, config, _tensors(source, config))
    return source, tmp_path / "model.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")


def check_logits(path: Path, source: str) -> None:
    mine, theirs = (logits_of(load(folder, torch.float32), IDS) for folder in (gguf_folder(str(path)), source))
    torch.testing.assert_close(mine, theirs, atol=5e-4, rtol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_checkpoint(name, tmp_path):
    source, path = build(name, tmp_path)
    check_logits(path, source)


@pytest.mark.slow
def test_scaled_layers_of_laguna(tmp_path):
    """As published models have them: the factor of the attention is the one that YaRN would compute."""
    source, path = build("laguna", tmp_path, {"rope_parameters": YARN})
    check_logits(path, source)
    ropes = parse_model_spec(model_config(read_gguf(path), {})).ropes
    assert ropes["sliding_attention"].scaling is None
    assert ropes["full_attention"].scaling["attention_factor"] == pytest.approx(1.3465735902799727)


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "full"), [(2, [0, 2]), (0, []), ([False, True, True, False], [0, 3]), (None, [0])])
def test_layers_of_laguna_with_a_window(pattern, full, tmp_path):
    """The first layer of each period has none."""
    _, path = build("laguna", tmp_path, **{"attention.sliding_window_pattern": pattern})
    layers = parse_model_spec(model_config(read_gguf(path), {})).layers
    assert [i for i, layer in enumerate(layers) if layer.window is None] == full


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("laguna", {"expert_weights_norm": False}, r"laguna\.expert_weights_norm must be True, not False"),
        ("laguna", {"expert_gating_func": 1}, r"laguna\.expert_gating_func must be 2, not 1"),
        ("laguna-entries", {"attention.key_length": 32}, r"attn_gate must all have one row per head, or all 32, not"),
        ("dots3_note", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, r"type 'yarn' is not supported"),
        ("dots3_note", {"attention.key_length_swa": 31}, r"dots3note\.attention\.key_length_swa must be 32, not 31"),
        ("dots3_note", {"attention.indexer.types": [True] * 4}, r"indexer\.types must be true for layers without"),
        ("hy_v4", {"swiglu_clamp_shexp": [0.5] * 3}, r"hy_v4\.swiglu_clamp_shexp .* is not supported"),
        ("hy_v4", {"swiglu_clamp_exp": [0.5, 0.5, 0.7]}, r"swiglu_clamp_exp differs from layer to layer"),
        ("hy_v4", {"attention.indexer.top_k": None}, r"the metadata has no hy_v4\.attention\.indexer\.top_k"),
    ],
)
def test_keys_that_are_refused(name, changes, message, tmp_path):
    _, path = build(name, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        gguf_folder(str(path))
