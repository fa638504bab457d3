"""GGUF files of all architectures: converted from tiny checkpoints by llama.cpp's rules, they give the logits of
transformers for the weights that the file's blocks stand for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.gguf.architectures import ARCHITECTURES
from quire.checkpoints.gguf.folder import gguf_folder
from quire.checkpoints.gguf.header import GgufFile
from quire.checkpoints.gguf.model_config import model_config
from quire.checkpoints.reading import KeptReads
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.experts import NativeExperts
from quire.worker.parallel import Group, use_groups
from tests.helpers.models.checkpoints import CHECKPOINTS as DENSE
from tests.helpers.models.checkpoints import MOE_CHECKPOINTS, build_checkpoint
from tests.helpers.models.families import FAMILIES, build_family
from tests.helpers.models.gguf_cases import NEWER_CASES
from tests.helpers.models.gguf_converter import Converter, common, experts
from tests.helpers.models.judges import load_family
from tests.helpers.models.ocr_models import build_model as build_ocr_model
from tests.helpers.worker.ranks import run_ranks, thread_groups
from tests.worker.layers.test_stored_weights import load, logits_of

pytestmark = pytest.mark.slow
IDS = [int(i) for i in torch.randint(3, 120, (60,), generator=torch.Generator().manual_seed(3))]
HEAD = {"query_pre_attn_scalar": 16}
Q = {"default": "Q8_0", "ffn_down": "Q4_0", "token_embd": "Q5_1", "ffn_down_exps": "Q4_1", "ffn_gate_exps": "MXFP4"}
Keys = Callable[[dict[str, Any]], dict[str, Any]]
Case = tuple[str, dict[str, Any], Keys]


def _nothing(c: dict[str, Any]) -> dict[str, Any]:
    return {}


def _latent(c: dict[str, Any]) -> dict[str, Any]:
    """The keys of older files, whose kv_b_proj is one tensor."""
    return {
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "attention.key_length": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length": c["v_head_dim"],
        "rope.dimension_count": c["qk_rope_head_dim"],
    } | ({"attention.q_lora_rank": c["q_lora_rank"]} if c["q_lora_rank"] else {})


def _latent_split(c: dict[str, Any]) -> dict[str, Any]:
    rank, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
    old = _latent(c)
    return old | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": old["attention.key_length"],
        "attention.value_length_mla": c["v_head_dim"],
    }


def _windows(c: dict[str, Any]) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]]}


def _granite(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_scale": c["embedding_multiplier"],
        "residual_scale": c["residual_multiplier"],
        "attention.scale": c["attention_multiplier"],
        "logit_scale": c["logits_scaling"],
    }


def _groups(c: dict[str, Any]) -> dict[str, Any]:
    return {"expert_group_count": c["n_group"], "expert_group_used_count": c["topk_group"]}


def _gemma3n(c: dict[str, Any]) -> dict[str, Any]:
    scales = [NormalDist().inv_cdf(x) if x else -math.inf for x in c["activation_sparsity_pattern"]]
    return _windows(c) | {
        "attention.shared_kv_layers": c["num_kv_shared_layers"],
        "embedding_length_per_layer_input": c["hidden_size_per_layer_input"],
        "altup.num_inputs": c["altup_num_inputs"],
        "altup.active_idx": c["altup_active_idx"],
        "activation_sparsity_scale": scales,
        "rope.freq_base_swa": 10000.0,
    }


def _sigmoid(c: dict[str, Any]) -> dict[str, Any]:
    return experts(c) | {"expert_gating_func": 2, "expert_weights_norm": True}


def _indexed(c: dict[str, Any]) -> dict[str, Any]:
    index = {"top_k": c["index_topk"], "head_count": c["index_n_heads"], "key_length": c["index_head_dim"]}
    return _sigmoid(c) | _latent_split(c) | _groups(c) | {f"attention.indexer.{k}": v for k, v in index.items()}


def _gemma4(c: dict[str, Any]) -> dict[str, Any]:
    layers, shared = c["num_hidden_layers"], c["num_kv_shared_layers"]
    full = next(iter((c.get("per_layer_config") or {}).values()), {})
    double = [c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and i >= layers - shared else 1)
              for i in range(layers)]  # fmt: skip
    kinds = c["layer_types"]
    heads = [full.get("num_key_value_heads") or c["num_key_value_heads"] if kind == "full_attention"
             else c["num_key_value_heads"] for kind in kinds]  # fmt: skip
    return (
        _windows(c)
        | {
            "feed_forward_length": double,
            "attention.head_count_kv": heads,
            "attention.key_length": full.get("head_dim") or c["global_head_dim"],
            "attention.key_length_swa": c["head_dim"],
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": c["hidden_size_per_layer_input"] or 0,
            "rope.freq_base_swa": 10000.0,
        }
        | ({"final_logit_softcapping": c["final_logit_softcapping"]} if c["final_logit_softcapping"] else {})
        | (experts(c) if c.get("num_experts") else {})
    )


def _granite_swa(c: dict[str, Any]) -> dict[str, Any]:
    return _granite(c) | _windows(c) | {"attention.rope_pattern": [theta > 0 for theta in c["layer_rope_theta"]]}


def _hy_v3(c: dict[str, Any]) -> dict[str, Any]:
    size = c["moe_intermediate_size"] * c["num_shared_experts"]
    return _sigmoid(c) | {"expert_shared_feed_forward_length": size}


def _llama4(c: dict[str, Any]) -> dict[str, Any]:
    return experts(c) | {
        "feed_forward_length": c["intermediate_size_mlp"],
        "expert_feed_forward_length": c["intermediate_size"],
        "interleave_moe_layer_step": c["interleave_moe_layer_step"],
    }


def _mistral4(c: dict[str, Any]) -> dict[str, Any]:
    rope = c["rope_parameters"]
    return (
        experts(c)
        | _latent_split(c)
        | _groups(c)
        | {
            "expert_weights_norm": True,
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"] / 10,
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    )


BOUND = {"final_logit_softcapping": 30.0}  # files of Gemma 4 without the key mean this
SIZES = {"hidden_size": 64, "intermediate_size": 96}
WIDE = SIZES | {"moe_intermediate_size": 64}
LATENT = {"qk_nope_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 32}
MISTRAL4_ROPE = FAMILIES["mistral4"][1]["rope_parameters"] | {"mscale": 0.8}
# name of a checkpoint -> (architecture of GGUF files, changed settings, further keys)
CASES: dict[str, Case] = {
    "arcee": ("arcee", SIZES, _nothing),
    "cohere": ("command-r", SIZES, lambda c: {"logit_scale": c["logit_scale"]}),
    "cohere2": ("cohere2", SIZES, lambda c: {"logit_scale": c["logit_scale"]}),
    "ernie4_5": ("ernie4_5", SIZES, _nothing),
    "exaone4": ("exaone4", SIZES, _windows),
    "exaone4-full": ("exaone4", SIZES, _nothing),
    "gemma": ("gemma", SIZES, _nothing),
    "gemma2": ("gemma2", SIZES | HEAD, lambda c: {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3", SIZES | HEAD, _windows),
    "gemma4": ("gemma4", SIZES | BOUND | {"hidden_size_per_layer_input": 32}, _gemma4),
    "gemma4-k-is-v": ("gemma4", SIZES | BOUND, _gemma4),
    "glm4": ("glm4", SIZES, _nothing),
    "gpt2": ("gpt2", {}, _nothing),
    "granite": ("granite", SIZES, _granite),
    "hunyuan": ("hunyuan-dense", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, _nothing),
    "ministral3": ("mistral3", SIZES, lambda c: {"attention.temperature_scale": 0.1}),
    "nemotron": ("nemotron", SIZES, _nothing),
    "olmo2": ("olmo2", SIZES, _nothing),
    "olmo3": ("olmo2", SIZES, _windows),
    "phi3": ("phi3", {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96}, _nothing),
    "smollm3": ("smollm3", SIZES, _nothing),
    "starcoder2": ("starcoder2", SIZES, _nothing),
    "minicpm3": (
        "minicpm3",
        {"q_lora_rank": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dim_model_base": 256}
        | {"scale_emb": 12, "scale_depth": 1.4},
        _latent,
    ),
    "mixtral": ("llama", {}, experts),
    "qwen2-moe": ("qwen2moe", WIDE | {"mlp_only_layers": []}, experts),
    "qwen3-moe": ("qwen3moe", WIDE, experts),
    "olmoe": ("olmoe", {"intermediate_size": 64}, lambda c: experts(c) | {"attention.clamp_kqv": 0.8}),
    "gpt-oss": (
        "gpt-oss",
        {"intermediate_size": 64},
        lambda c: experts(c) | {"expert_feed_forward_length": c["intermediate_size"]},
    ),
    "granite-moe": ("granitemoe", {"intermediate_size": 64}, lambda c: experts(c) | _granite(c)),
    "glm4-moe": (
        "glm4moe",
        WIDE,
        lambda c: experts(c) | _groups(c) | {"expert_gating_func": 2, "expert_weights_norm": True},
    ),
    "ernie4.5-moe": ("ernie4_5-moe", WIDE, lambda c: experts(c) | {"interleave_moe_layer_step": 1}),
    "hunyuan-moe": ("hunyuan-moe", {"intermediate_size": 64, "moe_topk": 2}, experts),
    "minimax-m2": ("minimax-m2", {"intermediate_size": 64}, lambda c: experts(c) | {"expert_gating_func": 2}),
    "deepseek-v2": ("deepseek2", WIDE, lambda c: experts(c) | _latent(c) | _groups(c)),
    "deepseek-v3": (
        "deepseek2",
        WIDE | {"qk_nope_head_dim": 32, "q_lora_rank": 64},
        lambda c: (
            experts(c)
            | _latent_split(c)
            | _groups(c)
            | {"expert_gating_func": 2, "expert_weights_norm": True, "rope.scaling.yarn_log_multiplier": 0.08}
        ),
    ),
}
CASES |= NEWER_CASES | {
    "exaone_moe": ("exaone-moe", WIDE | {"head_dim": 16}, lambda c: _sigmoid(c) | _groups(c) | _windows(c)),
    "gemma3n": ("gemma3n", SIZES | {"hidden_size_per_layer_input": 32, "laurel_rank": 32}, _gemma3n),
    "gemma4-experts": ("gemma4", WIDE | BOUND, _gemma4),
    "glm": ("chatglm", SIZES, _nothing),
    "glm-5": ("glm-dsa", WIDE | LATENT, _indexed),
    "deepseek-v32": ("deepseek32", WIDE | LATENT, _indexed),
    "granite_swa": ("granite_swa", SIZES | {"layer_rope_theta": [1e4, 0, 1e4, 1e4]}, _granite_swa),
    "granite_moe_shared": (
        "granitemoe",
        {"intermediate_size": 64, "shared_intermediate_size": 64},
        lambda c: experts(c) | _granite(c) | {"expert_shared_feed_forward_length": c["shared_intermediate_size"]},
    ),
    "hy_v3": ("hy_v3", WIDE, _hy_v3),
    "internlm3": ("llama", SIZES, _nothing),
    "llama4": (
        "llama4",
        {"hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_hidden_layers": 5}
        | {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "floor_scale": 8192, "attn_scale": 0.1},
        _llama4,
    ),
    "mistral4": ("mistral4", WIDE | LATENT | {"rope_parameters": MISTRAL4_ROPE}, _mistral4),
    "solar_open": ("glm4moe", {"hidden_size": 64, "moe_intermediate_size": 64}, lambda c: _sigmoid(c) | _groups(c)),
}


def _attending(c: dict[str, Any]) -> dict[str, Any]:
    heads = c["num_key_value_heads"]
    return {
        "attention.head_count_kv": [
            heads if "attention" in kind and "linear" not in kind else 0 for kind in c["layer_types"]
        ]
    }


def _delta(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
        "full_attention_interval": 4,
        "rope.dimension_sections": [2, 1, 1, 0],
    }


def _granite_hybrid(c: dict[str, Any]) -> dict[str, Any]:
    mixture = c["num_local_experts"] > 0
    shared = c["shared_intermediate_size"]
    return (
        _granite(c)
        | _attending(c)
        | (experts(c) | {"expert_shared_feed_forward_length": shared} if mixture else {"feed_forward_length": shared})
        | {
            "ssm.conv_kernel": c["mamba_d_conv"],
            "ssm.state_size": c["mamba_d_state"],
            "ssm.group_count": c["mamba_n_groups"],
            "ssm.time_step_rank": c["mamba_n_heads"],
            "ssm.inner_size": c["mamba_n_heads"] * c["mamba_d_head"],
            "rope.scaling.finetuned": False,
        }
    )


def _mamba2(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.state_size": c["state_size"],
        "ssm.group_count": c["n_groups"],
        "ssm.time_step_rank": c["num_heads"],
        "ssm.inner_size": c["num_heads"] * c["head_dim"],
    }


def _mamba1(c: dict[str, Any]) -> dict[str, Any]:
    falcon = {"ssm.dt_b_c_rms": True} if c["model_type"] == "falcon_mamba" else {}
    return falcon | {
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.state_size": c["state_size"],
        "ssm.time_step_rank": c["time_step_rank"],
        "ssm.inner_size": c["intermediate_size"],
    }


def _jamba(c: dict[str, Any]) -> dict[str, Any]:
    heads, period = c["num_key_value_heads"], c["attn_layer_period"]
    attends = [i % period == c["attn_layer_offset"] for i in range(c["num_hidden_layers"])]
    return experts(c) | {
        "attention.head_count_kv": [heads if one else 0 for one in attends],
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.time_step_rank": c["mamba_dt_rank"],
        "ssm.inner_size": c["mamba_expand"] * c["hidden_size"],
    }


def _nemotron_h(c: dict[str, Any]) -> dict[str, Any]:
    kinds = c["layers_block_type"]
    widths = {"mlp": c["intermediate_size"], "moe": c["moe_intermediate_size"]}
    found = {
        "attention.head_count_kv": [c["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.state_size": c["ssm_state_size"],
        "ssm.group_count": c["n_groups"],
        "ssm.time_step_rank": c["mamba_num_heads"],
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
        "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
    }
    if "moe" not in kinds:
        return found
    shared = {"expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"]}
    return found | _sigmoid(c) | _groups(c) | shared | {"moe_latent_size": c["moe_latent_size"] or 0}


def _falcon_h1(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.group_count": c["mamba_n_groups"],
        "ssm.time_step_rank": c["mamba_n_heads"],
        "ssm.inner_size": c["mamba_d_ssm"],
    }


def _kimi_linear(c: dict[str, Any]) -> dict[str, Any]:
    heads = [c["num_attention_heads"] if kind == "full_attention" else 0 for kind in c["layer_types"]]
    return _sigmoid(c) | {
        **_latent_split(c),
        "attention.head_count_kv": heads,
        "kda.head_dim": c["linear_head_dim"],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "leading_dense_block_count": c["mlp_layer_types"].count("dense"),
    }


FALCON_SCALES = {name: FAMILIES["falcon_h1"][1][name] for name in FAMILIES["falcon_h1"][1] if "multiplier" in name}
_MAMBA_SIZES = {"mamba_n_heads": 8, "mamba_proj_bias": False}
CASES |= {
    "lfm2": ("lfm2", SIZES | {"conv_bias": False}, lambda c: _attending(c) | {"shortconv.l_cache": c["conv_L_cache"]}),
    "lfm2_moe": (
        "lfm2moe",
        WIDE,
        lambda c: _sigmoid(c) | _attending(c) | {"shortconv.l_cache": 3, "leading_dense_block_count": 1},
    ),
    "qwen3_5": ("qwen35", SIZES | {"linear_value_head_dim": 32, "linear_num_value_heads": 4}, _delta),
    "qwen3_5_moe": (
        "qwen35moe",
        WIDE | {"linear_value_head_dim": 32, "shared_expert_intermediate_size": 32},
        lambda c: experts(c) | _delta(c),
    ),
    "granite4-mamba": ("granitehybrid", SIZES | _MAMBA_SIZES | {"shared_intermediate_size": 96}, _granite_hybrid),
    "granite4-mamba-experts": (
        "granitehybrid",
        SIZES | _MAMBA_SIZES | {"intermediate_size": 64, "shared_intermediate_size": 64},
        _granite_hybrid,
    ),
    "mamba": ("mamba", {"hidden_size": 64, "use_bias": False}, _mamba1),
    "falcon_mamba": ("mamba", {"hidden_size": 64, "use_bias": False}, _mamba1),
    "jamba": ("jamba", SIZES | {"mamba_proj_bias": False}, _jamba),
    "nemotron_h": ("nemotron_h", SIZES | {"use_bias": False, "mamba_num_heads": 8}, _nemotron_h),
    "nemotron_h-experts": (
        "nemotron_h_moe",
        WIDE | {"mamba_num_heads": 8, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32},
        _nemotron_h,
    ),
    "qwen3_next": (
        "qwen3next",
        WIDE | {"linear_value_head_dim": 32, "shared_expert_intermediate_size": 32},
        lambda c: experts(c) | _delta(c),
    ),
    "falcon_h1-gate-first": (
        "falcon-h1",
        SIZES | {"mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_proj_bias": False} | FALCON_SCALES,
        _falcon_h1,
    ),
    "bailing_hybrid": (
        "bailingmoe3",
        WIDE | LATENT | {"linear_head_dim": 32},
        lambda c: _kimi_linear(c) | _groups(c | {"n_group": c["num_expert_group"]}) | {"kda.gate_lower_bound": -5.0},
    ),
    "kimi_linear": ("kimi-linear", WIDE | LATENT | {"q_lora_rank": None, "linear_head_dim": 32}, _kimi_linear),
    "mamba2": (
        "mamba2",
        {"hidden_size": 64, "num_heads": 8, "time_step_limit": (0.0, 1e9)},
        _mamba2,
    ),
}
SPLIT_LATENTS = ("bailing_hybrid", "kimi_linear", "deepseek-v3", "deepseek-v32", "glm-5", "mistral4")
SAME_SCALE = {"deepseek-v3": {"mscale": 0.8}}  # files have one number for mscale and mscale_all_dim


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")


def pair(
    name: str,
    tmp_path: Path,
    kinds: dict[str, str] = Q,
    case: Case | None = None,
    fused: bool = False,
    fuse_qkv: bool = False,
    ungrouped: bool = True,
    **sizes: int,
) -> tuple[str, str]:
    """(the folder made of a GGUF file, transformers' checkpoint with the weights that the file stands for)."""
    arch, usual, keys = case or CASES[name]
    sizes = usual | sizes
    build = build_checkpoint if name in MOE_CHECKPOINTS | DENSE else build_family
    if name in SAME_SCALE:
        rope = MOE_CHECKPOINTS[name][1]["rope_parameters"] | SAME_SCALE[name]
        sizes = sizes | {"rope_parameters": rope}
    source = build(name, tmp_path / "source", **sizes)
    options = {"split_latents": name in SPLIT_LATENTS, "fused": fused, "fuse_qkv": fuse_qkv}
    options["ungrouped"] = ungrouped
    converter = Converter(source, tmp_path / "model.gguf", arch, kinds, **options)
    metadata = common(converter.config) | keys(converter.config)
    for key, factor in (("long", "long_factor"), ("short", "short_factor")):
        if factor in (converter.config.get("rope_parameters") or {}):
            values = np.array(converter.config["rope_parameters"][factor], np.float32)
            converter.writer.add_tensor(f"rope_factors_{key}.weight", values)
            metadata["rope.scaling.original_context_length"] = converter.config["original_max_position_embeddings"]
    converter.run(metadata)
    return gguf_folder(str(tmp_path / "model.gguf")), source


def reference(source: str) -> torch.Tensor:
    with torch.inference_mode():
        return load_family(source)(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path, name):
    folder, source = pair(name, tmp_path)
    expected = reference(source)
    assert torch.allclose(logits_of(load(folder), IDS), expected, atol=2e-3, rtol=2e-3)


LANGUAGE_MODELS: dict[str, Case] = {
    "qwen2": ("qwen2vl", SIZES, _nothing),
    "qwen3": ("qwen3vl", SIZES, _nothing),
    "qwen3-moe": ("qwen3vlmoe", WIDE, experts),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_of_models_with_images(tmp_path, name):
    folder, source = pair(name, tmp_path, case=LANGUAGE_MODELS[name])
    assert torch.allclose(logits_of(load(folder), IDS), reference(source), atol=2e-3, rtol=2e-3)


def plain_deepseek(tmp_path: Path, arch: str, kinds: dict[str, str] = Q) -> Path:
    """Write a GGUF file of a model with plain attention, and return the folder of the safetensors."""
    whole, source = tmp_path / "whole", tmp_path / "source"
    build_ocr_model("deepseek_ocr2", whole, hidden_size=64, intermediate_size=96, moe_intermediate_size=64)
    config = json.loads((whole / "config.json").read_text())["text_config"]
    config |= {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "first_k_dense_replace": 1}
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    names = re.compile(r"(model\.)?(language_model\.)?(?:model\.)?((?:embed_tokens|layers|norm|lm_head)\..*)")
    found = {names.fullmatch(name): tensor for name, tensor in load_file(whole / "model.safetensors").items()}
    weights = {
        match[3] if match[3].startswith("lm_head") else f"model.{match[3]}": t for match, t in found.items() if match
    }
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    converter = Converter(str(source), tmp_path / "model.gguf", arch, kinds)
    converter.run(common(config) | experts(config))
    return source


@pytest.mark.parametrize("arch", ["deepseek", "deepseek2-ocr"])
def test_deepseek_with_plain_attention(tmp_path, arch):
    """Compared with the safetensors, which `tests/end_to_end/test_deepseek_ocr.py` compares with transformers."""
    source = plain_deepseek(tmp_path, arch)
    folder = gguf_folder(str(tmp_path / "model.gguf"))
    expected = logits_of(load(str(source)), IDS)
    assert torch.allclose(logits_of(load(folder), IDS), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_fused_q_k_and_v(tmp_path, name):
    """As `--fuse-qkv` of llama.cpp's converter writes them."""
    arch = "llama" if name == "llama3" else name
    case = arch, SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, _nothing
    folder, source = pair(name, tmp_path, case=case, fuse_qkv=True)
    assert torch.allclose(logits_of(load(folder), IDS), reference(source), atol=2e-3, rtol=2e-3)


def test_older_files_of_qwen3_next(tmp_path):
    """They have q, k, v and z in one tensor, those of each key head together."""
    folder, source = pair("qwen3_next", tmp_path, ungrouped=False)
    assert torch.allclose(logits_of(load(folder), IDS), reference(source), atol=2e-3, rtol=2e-3)


def test_all_architectures_are_tested():
    tested = {arch for arch, _, _ in (*CASES.values(), *LANGUAGE_MODELS.values())}
    tested |= {"deepseek", "deepseek2-ocr", "qwen2", "qwen3", "llama"}  # the last three: tests/checkpoints/test_gguf.py
    tested |= {"plamo2", "plamo3"}  # tests/checkpoints/test_gguf_plamo.py
    tested |= {"dots3note", "hy_v4", "laguna"}  # tests/checkpoints/test_gguf_gated.py
    tested |= {"glm5-next", "minimax-01", "step35"}  # tests/checkpoints/test_gguf_states.py
    assert ARCHITECTURES.keys() - tested == {"bert", "gemma-embedding", "modern-bert", "nomic-bert"}  # encoders


EXPERTS = ["mixtral", "gpt-oss", "deepseek-v3", "qwen2-moe"]


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks(tmp_path, name, expert_parallel):
    """Halves of experts of 64 columns, or half of the experts."""
    folder, source = pair(name, tmp_path)
    expected, models = reference(source), []
    for group in thread_groups(2):
        with use_groups(tp=group, ep=group if expert_parallel else Group()):
            models.append(load(folder))
    for logits in run_ranks(lambda rank: logits_of(models[rank], IDS), 2):
        assert torch.allclose(logits, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3", "gemma4"])
def test_native_kernels_multiply_the_blocks(tmp_path, native_kernels, exact_activations, name):
    folder, source = pair(name, tmp_path)
    exact = reference(source)
    rounding = float((logits_of(load(source, torch.bfloat16), IDS) - exact).norm())
    native = load(folder, torch.bfloat16, CpuPlatform().ops)
    assert float((logits_of(native, IDS) - exact).norm()) < 1.5 * rounding
    held = sum(t.nbytes for t in {t.data_ptr(): t for t in [*native.parameters(), *native.buffers()]}.values())
    # rotary tables, kv_b_proj in bfloat16
    assert held < (tmp_path / "model.gguf").stat().st_size + (2 << 20)


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [("Q3_K", "Q2_K"), ("IQ4_XS", "IQ4_NL"), ("Q2_K", "Q3_K"), ("Q5_0", "Q4_1"), ("Q5_1", "Q5_0"), ("Q4_K", "Q6_K")],
)
def test_experts_of_one_type_are_one_native_call(tmp_path, native_kernels, exact_activations, gate_up, down):
    kinds = {"default": "Q8_0", "ffn_gate_exps": gate_up, "ffn_up_exps": gate_up, "ffn_down_exps": down}
    folder, source = pair("qwen3-moe", tmp_path, kinds, hidden_size=256, moe_intermediate_size=256)
    exact, native = load(source), load(folder, torch.bfloat16, CpuPlatform().ops)
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for theirs, ours in zip(exact.model.layers.values(), native.model.layers.values()):
        weights, ids = theirs.mlp.gate(x.float())  # the same for both: rounding may change a choice
        expected, found = theirs.mlp.experts(x.float(), weights, ids), ours.mlp.experts(x, weights, ids)
        assert isinstance(ours.mlp.experts._native, NativeExperts)
        assert float((found.float() - expected).norm()) < 0.01 * float(expected.norm())


def test_fused_gate_and_up(tmp_path):
    folder, source = pair("qwen3-moe", tmp_path, fused=True)
    assert torch.allclose(logits_of(load(folder), IDS), reference(source), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("arch", "change", "words"),
    [
        ("qwen3", {"expert_count": 4}, "experts in GGUF files of the architecture qwen3 are not supported"),
        ("gemma", {"feed_forward_length": [96, 64]}, r"gemma\.feed_forward_length differs from layer to layer"),
        ("llama", {"rope.scaling.type": "su"}, r"llama\.rope\.scaling\.type 'su' is not supported"),
        ("phi3", {"attention.layer_norm_rms_epsilon": None}, r"has neither phi3\.attention\.layer_norm_rms_epsilon"),
    ],
)
def test_unsupported_metadata_is_named(tmp_path, arch, change, words):
    file = GgufFile(tmp_path / "model.gguf", KeptReads({"general.architecture": arch}), {})
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    keys = common(config | {"max_position_embeddings": 512, "rms_norm_eps": 1e-6}) | {"expert_used_count": 2} | change
    file.metadata.update({f"{arch}.{key}": value for key, value in keys.items() if value is not None})
    with pytest.raises(ValueError, match=words):
        model_config(file, {})
