"""GGUF files of GLM-5-next, MiniMax-01 and Step 3.5, written by llama.cpp's rules, give the logits of the checkpoints
that they were made of. The `gguf` package does not know the names of the first two yet.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
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
from tests.helpers.models.families import build_family
from tests.worker.layers.test_stored_weights import load, logits_of

gguf = pytest.importorskip("gguf")

IDS = [int(i) for i in torch.randint(3, 120, (60,), generator=torch.Generator().manual_seed(3))]
COMMON = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{name}_proj.weight": f"attn_{name}.weight" for name in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    **{f"mlp.{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")},
    **{f"mlp.experts.{name}_proj.weight": f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
}
GLM = COMMON | {
    **{f"self_attn.{name}_conv1d.weight": f"ssm_conv1d_{name}.weight" for name in "qkv"},
    **{f"self_attn.{name}_proj.weight": f"ssm_{name}.weight" for name in ("f_a", "f_b", "g_a", "g_b")},
    **{f"hc_{half}_{name}": f"hc_{half}_{name}.weight" for half in ("attn", "ffn") for name in ("fn", "base", "scale")},
    **{f"mlp.shared_experts.{name}_proj.weight": f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")},
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.A_log": "ssm_a",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.k_b": "attn_k_b.weight",
    "self_attn.v_b": "attn_v_b.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
}
MINIMAX = COMMON | {
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.norm.weight": "attn_norm_2.weight",
    "self_attn.output_gate.weight": "attn_gate.weight",
}
_MOE = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
STEP = COMMON | {
    "self_attn.g_proj.weight": "attn_gate.weight",
    **{f"self_attn.{name}_norm.weight": f"attn_{name}_norm.weight" for name in "qk"},
    "moe.gate.weight": "ffn_gate_inp.weight",
    "moe.router_bias": "exp_probs_b.bias",
    **{f"moe.{name}_proj.weight": f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
    **{f"share_expert.{name}_proj.weight": f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")},
}
_DECAY = re.compile(r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$|^(model\.)?(visual|vision_model|vit_)")


def _tensors(folder: str, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint by the names of `COMMON`, experts together, of latent keys and values two."""
    found, experts = {}, defaultdict(list)
    for name, value in sorted(load_file(Path(folder, "model.safetensors")).items()):
        name = name.replace("language_model.", "")
        for old, new in _MOE.items():
            name = name.replace(old, new)
        value = value.float()
        if _DECAY.search(name):
            continue
        if match := re.fullmatch(r"(.*\.experts)\.\d+(\..*)", name):
            experts[match[1] + match[2]].append(value)
        elif name.endswith("kv_b_proj.weight"):
            heads = value.unflatten(0, (c["num_attention_heads"], -1))
            keys, values = heads.split([c["qk_nope_head_dim"], c["v_head_dim"]], 1)
            found[name.replace("kv_b_proj.weight", "k_b")] = keys.transpose(1, 2)
            found[name.replace("kv_b_proj.weight", "v_b")] = values
        elif name.endswith("_conv1d.weight"):
            found[name] = value.reshape(1, len(value), 1, -1)
        else:
            plus = float(c["model_type"] == "step3p5" and name.endswith("norm.weight"))
            found[name] = -value.exp() if name.endswith("A_log") else value + plus
    found |= {name: torch.stack(values) for name, values in experts.items()}
    return {name: value.contiguous().numpy() for name, value in found.items()}


Keys = dict[str, Any]


def write(path: Path, kind: str, keys: Keys, names: dict[str, str], c: Keys, tensors: dict[str, np.ndarray]) -> None:
    """Write a file of `tensors`, whose names in a layer are those of `names`."""
    writer = gguf.GGUFWriter(path, kind)
    sizes = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "expert_used_count": c["num_experts_per_tok"],
    }
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    add[str] = writer.add_string
    for key, value in (sizes | keys).items():
        add[type(value)](f"{kind}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(c["vocab_size"])])
    for name, value in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        writer.add_tensor(f"blk.{match[1]}.{names[match[2]]}" if match else names[name], value)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


def _glm(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [int(kind != "linear_attention") for kind in c["layer_types"]],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "kda.head_dim": c["linear_head_dim"],
        "kda.gate_lower_bound": c["linear_lower_bound"],
        "attention.q_lora_rank": c["q_lora_rank"],
        "attention.kv_lora_rank": c["kv_lora_rank"],
        "rope.dimension_count": 0,
        "attention.key_length": c["kv_lora_rank"],
        "attention.value_length": c["kv_lora_rank"],
        "attention.key_length_mla": c["qk_nope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"],
        "attention.indexer.head_count": c["index_n_heads"],
        "attention.indexer.key_length": c["index_head_dim"],
        "attention.indexer.top_k": c["index_topk"],
        "attention.indexer.kpool": c["index_kpool"],
        "attention.indexer.kpool_select_tail": True,
        "hyper_connection.count": c["hc_mult"],
        "hyper_connection.sinkhorn_iterations": c["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": c["hc_eps"],
        "leading_dense_block_count": c["mlp_layer_types"].count("dense"),
        "expert_count": c["n_routed_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_weights_scale": c["routed_scaling_factor"],
        "expert_weights_norm": c["norm_topk_prob"],
        "swiglu_clamp_exp": [c["swiglu_limit"]] * c["num_hidden_layers"],
        "swiglu_clamp_shexp": [c["swiglu_limit"]] * c["num_hidden_layers"],
    }


def _minimax(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["hidden_size"] // c["num_attention_heads"],
        "attention.value_length": c["hidden_size"] // c["num_attention_heads"],
        "rope.freq_base": float(c["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": c["hidden_size"] // c["num_attention_heads"],
        "expert_count": c["num_local_experts"],
        "residual_scale": 1.3,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in c["layer_types"]],
    }


def _step(c: dict[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in c["layer_types"]]
    heads = c["num_attention_heads"], c["num_sliding_attention_heads"]
    return {
        "attention.head_count": [heads[one] for one in slides],
        "attention.head_count_kv": [c["num_key_value_heads"]] * len(slides),
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "rope.freq_base": c["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": c["rope_parameters"]["sliding_attention"]["rope_theta"],
        "expert_count": c["n_routed_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_feed_forward_length": c["share_expert_dim"],
        "expert_weights_scale": c["moe_router_scaling_factor"],
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
        "moe_every_n_layers": 1,
        "swiglu_clamp_exp": [float(one) for one in c["swiglu_limits"]],
        "swiglu_clamp_shexp": [float(one) for one in c["swiglu_limits_shared"]],
    }


_ONE = (("alpha", 1.3), ("beta", 1.0))
FACTORS = {f"{name}_{one}_factor": value for name in ("linear_attn", "full_attn", "mlp") for one, value in _ONE}
CASES = {"glm5_next": ("glm5-next", {}, _glm, GLM), "minimax": ("minimax-01", FACTORS, _minimax, MINIMAX)}
CASES["step3p5"] = ("step35", {}, _step, STEP)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")


def build(name: str, tmp_path: Path, **changes: Any) -> tuple[str, Path]:
    """The checkpoint, and the file made of it with `changes` of its keys."""
    kind, settings, keys, names = CASES[name]
    source = build_family(name, tmp_path / "source", **settings)
    config = json.loads(Path(source, "config.json").read_text())
    config = config.get("text_config", config)
    write(tmp_path / "model.gguf", kind, keys(config) | changes, names, config, _tensors(source, config))
    return source, tmp_path / "model.gguf"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_checkpoint(name, tmp_path):
    drafting = {"block_count": 4, "nextn_predict_layers": 1, "attention.head_count_kv": [0, 1, 0, 1]}
    source, path = build(name, tmp_path, **drafting if name == "glm5_next" else {})
    mine, theirs = (logits_of(load(folder, torch.float32), IDS) for folder in (gguf_folder(str(path)), source))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_factors_of_the_frequencies_of_step_3_5(tmp_path):
    """They are those of Llama 3 at the base of the layers without a window, which alone are scaled."""
    _, path = build("step3p5", tmp_path)
    waves = [2 * np.pi * 1e5 ** (i / 8) for i in range(8)]
    smooth = [min(1.0, max(0.0, (256 / wave - 1) / 3)) for wave in waves]
    config = model_config(read_gguf(path), {"rope_freqs.weight": [1 / ((1 - s) / 2 + s) for s in smooth]})
    assert config["rope_scaling"]["rope_type"] == "llama3" and config["rope_scaling"]["factor"] == 2.0
    ropes = parse_model_spec(config).ropes
    assert ropes["sliding_attention"].scaling is None and ropes["full_attention"].scaling["factor"] == 2.0


def test_glm_5_next_without_bounds(tmp_path):
    """Without its key the decay has no lower bound, and the MLPs' gates have none."""
    _, path = build("glm5_next", tmp_path)
    file = read_gguf(path)
    for key in ("kda.gate_lower_bound", "swiglu_clamp_exp", "swiglu_clamp_shexp"):
        del file.metadata[f"glm5-next.{key}"]
    spec = parse_model_spec(model_config(file, {}))
    assert [layer.state.lower_bound for layer in spec.layers if layer.state] == [None, None]
    assert spec.hidden_act == "silu" and {layer.moe.activation for layer in spec.layers if layer.moe} == {"silu"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm5_next", {"swiglu_clamp_exp": [0.5, 0.7, 0.5]}, "swiglu_clamp_shexp must be one number"),
        ("glm5_next", {"attention.indexer.kpool_select_tail": False}, "kpool_select_tail must be True, not False"),
        ("minimax", {"attention.recurrent_layers": [True] * 4}, "full_attention_interval does not fit"),
    ],
)
def test_keys_that_are_refused(name, changes, message, tmp_path):
    _, path = build(name, tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        gguf_folder(str(path))
