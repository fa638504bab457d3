"""Implements families that transformers lacks: a tiny random checkpoint of each in the layout of the published files,
and the published formula in plain torch, token by token where there is a state.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

VOCAB = 128
Tensors = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def rotate(x: torch.Tensor, theta: float, size: int | None = None, interleaved: bool = False) -> torch.Tensor:
    """Turn the first `size` entries of heads `[T, heads, D]` at positions 0 .. T - 1."""
    size = size or x.shape[-1]
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    turned = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = x[..., :size].unflatten(-1, (-1, 2)) if interleaved else x[..., :size].unflatten(-1, (2, -1)).mT
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turned)
    return torch.cat([(out if interleaved else out.mT).flatten(-2), x[..., size:]], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None) -> torch.Tensor:
    """Compute causal attention of heads `[T, heads, D]`; k and v may have fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | (distance >= (window or len(q)))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def plamo3_config() -> dict[str, Any]:
    return {
        "architectures": ["Plamo3ForCausalLM"],
        "model_type": "plamo3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "window_size": 24,
        "sliding_window_pattern": 2,
        "rope_theta": 150000,
        "rope_local_theta": 10000,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }


def plamo3_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        place = f"model.layers.layers.{i}"
        shapes |= {
            f"{place}.mixer.qkv_proj.weight": (8 * 16, hidden),
            f"{place}.mixer.o_proj.weight": (hidden, 4 * 16),
            f"{place}.mixer.q_norm.weight": (16,),
            f"{place}.mixer.k_norm.weight": (16,),
            f"{place}.mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"{place}.mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"{place}.{a}_{b}_norm.weight": (hidden,) for a in ("pre", "post") for b in ("mixer", "mlp")}
    return shapes


def plamo3(w: Tensors, c: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        of = {name.removeprefix(f"model.layers.layers.{i}."): tensor for name, tensor in w.items()}
        full = (i + 1) % c["sliding_window_pattern"] == 0
        y = rms(x, 1 + of["pre_mixer_norm.weight"]) @ of["mixer.qkv_proj.weight"].t()
        q, k, v = y.unflatten(-1, (8, 16)).split([4, 2, 2], 1)
        q, k = rms(q, 1 + of["mixer.q_norm.weight"]), rms(k, 1 + of["mixer.k_norm.weight"])
        q, k = (rotate(heads, float(c["rope_theta"] if full else c["rope_local_theta"])) for heads in (q, k))
        y = attend(q, k, v, 16**-0.5, None if full else c["window_size"]) @ of["mixer.o_proj.weight"].t()
        x = x + rms(y, 1 / 5 + of["post_mixer_norm.weight"])
        gate, up = of["mlp.gate_up_proj.weight"].chunk(2)
        y = swiglu(rms(x, 1 + of["pre_mlp_norm.weight"]), gate, up, of["mlp.down_proj.weight"])
        x = x + rms(y, 1 / 5**1.5 + of["post_mlp_norm.weight"])
    return rms(x, 1 + w["model.norm.weight"]) @ w["model.embed_tokens.weight"].t()


def plamo2_config() -> dict[str, Any]:
    return {
        "architectures": ["Plamo2ForCausalLM"],
        "model_type": "plamo2",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size_per_head": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_window_size": 24,
        "full_attention_idx": [3],
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "mamba_enabled": True,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }


def plamo2_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        place = f"model.layers.layers.{i}"
        own = {"qkv_proj.weight": (8 * 16, hidden), "o_proj.weight": (hidden, 64), "q_weight": (4, 16)}
        own |= {"k_weight": (2, 16)}
        if i % 2 == 0:
            own = {"in_proj.weight": (128, hidden), "conv1d.weight": (64, 1, 4), "bcdt_proj.weight": (80, 64)}
            own |= {"dt_proj.weight": (4, 64), "dt_bias": (4,), "A_log": (4,), "D": (4,), "dt_norm_weight": (64,)}
            own |= {"B_norm_weight": (8,), "C_norm_weight": (8,), "out_proj.weight": (hidden, 64)}
        shapes |= {f"{place}.mixer.{name}": shape for name, shape in own.items()}
        shapes |= {
            f"{place}.mlp.gate_up_proj.weight": (2 * inner, hidden),
            f"{place}.mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"{place}.{a}_{b}_norm.weight": (hidden,) for a in ("pre", "post") for b in ("mixer", "mlp")}
    return shapes


def plamo2(w: Tensors, c: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        of = {name.removeprefix(f"model.layers.layers.{i}."): tensor for name, tensor in w.items()}
        y = rms(x, 1 + of["pre_mixer_norm.weight"])
        if i % 2 == 0:
            y = _plamo_mamba(of, y)
        else:
            q, k, v = (y @ of["mixer.qkv_proj.weight"].t()).unflatten(-1, (8, 16)).split([4, 2, 2], 1)
            q, k = (rotate(rms(t, of[f"mixer.{n}_weight"]), 10000.0) for t, n in ((q, "q"), (k, "k")))
            window = None if i in c["full_attention_idx"] else c["attention_window_size"] + 1
            y = attend(q, k, v, 16**-0.5, window) @ of["mixer.o_proj.weight"].t()
        x = x + rms(y, 1 / 5 + of["post_mixer_norm.weight"])
        gate, up = of["mlp.gate_up_proj.weight"].chunk(2)
        y = swiglu(rms(x, 1 + of["pre_mlp_norm.weight"]), gate, up, of["mlp.down_proj.weight"])
        x = x + rms(y, 1 / 5**1.5 + of["post_mlp_norm.weight"])
    return rms(x, 1 + w["model.norm.weight"]) @ w["model.embed_tokens.weight"].t()


def _plamo_mamba(of: Tensors, x: torch.Tensor) -> torch.Tensor:
    w = {name.removeprefix("mixer."): tensor for name, tensor in of.items()}
    z, x = (x @ w["in_proj.weight"].t()).unflatten(-1, (4, 32)).split(16, -1)
    x = F.silu(F.conv1d(F.pad(x.flatten(1).t(), (3, 0)), w["conv1d.weight"], groups=64)).t()
    b, c, dt = (x @ w["bcdt_proj.weight"].t()).split([8, 8, 64], -1)
    b, c, dt = (rms(t, w[f"{n}_norm_weight"]) for t, n in ((b, "B"), (c, "C"), (dt, "dt")))
    dt, x = F.softplus(dt @ w["dt_proj.weight"].t() + w["dt_bias"]), x.unflatten(-1, (4, 16))
    state, rows = torch.zeros(4, 16, 8), []
    for token in range(len(x)):
        decay = torch.exp(-w["A_log"].exp() * dt[token])[:, None, None]
        state = decay * state + (dt[token, :, None] * x[token])[..., None] * b[token]
        rows.append(state @ c[token] + w["D"][:, None] * x[token])
    return (torch.stack(rows) * F.silu(z)).flatten(1) @ w["out_proj.weight"].t()


def ling_config() -> dict[str, Any]:
    return {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "model_type": "bailing_moe_v2_5",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "use_qk_norm": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def ling_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, size = c["hidden_size"], c["moe_intermediate_size"]
    shapes = {"model.word_embeddings.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (VOCAB, hidden)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        own = {"query_key_value": (192, hidden), "g_proj": (64, hidden), "g_norm": (64,)}
        own |= {"query_layernorm": (16,), "key_layernorm": (16,)}
        if (i + 1) % c["layer_group_size"] == 0:
            own = {"q_a_proj": (24, hidden), "q_a_layernorm": (24,), "q_b_proj": (4 * 24, 24)}
            own |= {"kv_a_proj_with_mqa": (24, hidden), "kv_a_layernorm": (16,), "kv_b_proj": (4 * 32, 16)}
        shapes |= {f"{at}.attention.{name}.weight": shape for name, shape in own.items()}
        shapes[f"{at}.attention.dense.weight"] = (hidden, 64)
        mlps = {"mlp": c["intermediate_size"]}
        if i >= c["first_k_dense_replace"]:
            mlps = {"mlp.shared_experts": size} | {f"mlp.experts.{e}": size for e in range(c["num_experts"])}
            shapes[f"{at}.mlp.gate.weight"] = (c["num_experts"], hidden)
            shapes[f"{at}.mlp.gate.expert_bias"] = (c["num_experts"],)
        for place, inner in mlps.items():
            shapes |= {f"{at}.{place}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{at}.{place}.down_proj.weight"] = (hidden, inner)
    return shapes


def ling(w: Tensors, c: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    x, layers = w["model.word_embeddings.weight"][ids], c["num_hidden_layers"]
    for i in range(layers):
        of = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in w.items()}
        full = (i + 1) % c["layer_group_size"] == 0
        y = rms(x, of["input_layernorm.weight"])
        x = x + (_latent(of, c, y) if full else _lightning(of, c, y, 1 - i / (layers - 1) + 1e-5))
        y = rms(x, of["post_attention_layernorm.weight"])
        x = x + (_ling_experts(of, c, y) if i >= c["first_k_dense_replace"] else _mlp(of, "mlp", y))
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].t()


def _mlp(of: Tensors, place: str, x: torch.Tensor) -> torch.Tensor:
    return swiglu(x, *(of[f"{place}.{name}_proj.weight"] for name in ("gate", "up", "down")))


def _lightning(of: Tensors, c: dict[str, Any], x: torch.Tensor, layer: float) -> torch.Tensor:
    w = {name: of[f"attention.{name}.weight"] for name in ("query_key_value", "g_proj", "g_norm", "dense")}
    q, k, v = (x @ w["query_key_value"].t()).unflatten(-1, (3, 4, 16)).unbind(1)
    q, k = rms(q, of["attention.query_layernorm.weight"]), rms(k, of["attention.key_layernorm.weight"])
    q, k = (rotate(heads, c["rope_theta"], 8) for heads in (q, k))
    decay = torch.exp(-layer * 2.0 ** (-2.0 * torch.arange(1, 5)))[:, None, None]
    state, rows = torch.zeros(4, 16, 16), []
    for token in range(len(x)):
        state = decay * state + k[token, :, :, None] * v[token, :, None]
        rows.append(torch.einsum("hk,hkv->hv", q[token] * 16**-0.5, state).flatten())
    groups = torch.stack(rows).unflatten(-1, (c["group_norm_size"], -1))
    y = rms(groups, 1.0).flatten(1) * w["g_norm"] * torch.sigmoid(x @ w["g_proj"].t())
    return y @ w["dense"].t()


def _latent(of: Tensors, c: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    w = {name.removeprefix("attention.").removesuffix(".weight"): tensor for name, tensor in of.items()}
    q = (rms(x @ w["q_a_proj"].t(), w["q_a_layernorm"]) @ w["q_b_proj"].t()).unflatten(-1, (4, 24))
    latent, shared = (x @ w["kv_a_proj_with_mqa"].t()).split([16, 8], -1)
    k, v = (rms(latent, w["kv_a_layernorm"]) @ w["kv_b_proj"].t()).unflatten(-1, (4, 32)).split(16, -1)
    turned = rotate(shared[:, None], c["rope_theta"], interleaved=True).expand(-1, 4, -1)
    q = torch.cat([q[..., :16], rotate(q[..., 16:], c["rope_theta"], interleaved=True)], -1)
    return attend(q, torch.cat([k, turned], -1), v, 24**-0.5) @ w["dense"].t()


def _ling_experts(of: Tensors, c: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    scores, out = torch.sigmoid(x @ of["mlp.gate.weight"].t()), _mlp(of, "mlp.shared_experts", x)
    for token, row in enumerate(scores):
        choice = (row + of["mlp.gate.expert_bias"]).view(c["n_group"], -1)
        groups = choice.topk(2).values.sum(-1).topk(c["topk_group"]).indices
        allowed = torch.full_like(choice, -torch.inf).index_copy(0, groups, choice[groups])
        best = allowed.flatten().topk(c["num_experts_per_tok"]).indices
        weights = row[best] / row[best].sum() * c["routed_scaling_factor"]
        for weight, expert in zip(weights, best.tolist()):
            out[token] += weight * _mlp(of, f"mlp.experts.{expert}", x[token])
    return out


Twin = tuple[Callable[[], dict], Callable[[dict], dict], Callable[[Tensors, dict, torch.Tensor], torch.Tensor]]
TWINS: dict[str, Twin] = {
    "ling": (ling_config, ling_shapes, ling),
    "plamo2": (plamo2_config, plamo2_shapes, plamo2),
    "plamo3": (plamo3_config, plamo3_shapes, plamo3),
}


def build_twin(name: str, folder: Path) -> str:
    """Write a tiny random checkpoint of a family into `folder` and return that."""
    make_config, shapes_of, _ = TWINS[name]
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor, shape in shapes_of(make_config()).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            around_zero = "bias" in tensor or (name.startswith("plamo") and tensor.endswith(("norm.weight", "_log")))
            tensors[tensor] = (0.0 if around_zero else 1.0) + 0.3 * noise
        else:
            tensors[tensor] = 0.7 * noise if shape[0] == VOCAB else 1.2 * noise / shape[-1] ** 0.5
    Path(folder, "config.json").write_text(json.dumps(make_config()), encoding="utf-8")
    save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
    return str(folder)


def load_twin(name: str, folder: Path) -> Callable[[torch.Tensor], Any]:
    """Return the published formula with the interface of transformers' models."""
    config, tensors = TWINS[name][0](), load_file(Path(folder, "model.safetensors"))
    return lambda ids: SimpleNamespace(logits=TWINS[name][2](tensors, config, ids[0])[None])
