"""Implements DeepSeek-OCR plainly from its published configuration and code: a tiny random checkpoint in the layout of
deepseek-ai/DeepSeek-OCR, and the logits of tokens and pages computed from its tensors, one page and one head at a time.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

IMAGE_TOKEN_ID = 10
Tensors = dict[str, torch.Tensor]

TEXT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseekv2.DeepseekV2Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 24,
    "intermediate_size": 40,
    "kv_lora_rank": None,
    "lm_head": True,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_attention_heads": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "rm_head": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "float32",
    "use_mla": False,
    "v_head_dim": 0,
    "vocab_size": 300,
}
SAM = {"downsample_channels": [20, 16], "global_attn_indexes": [1], "heads": 2, "layers": 2, "width": 16}
CLIP = {"heads": 2, "image_size": 28, "layers": 2, "patch_size": 14, "width": 16}
CONFIG = {
    "architectures": ["DeepseekOCRForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_deepseekocr.DeepseekOCRConfig",
        "AutoModel": "modeling_deepseekocr.DeepseekOCRForCausalLM",
    },
    "candidate_resolutions": [[1024, 1024]],
    "global_view_pos": "head",
    "language_config": TEXT,
    "model_type": "deepseek_vl_v2",
    "projector_config": {"input_dim": 32, "model_type": "mlp_projector", "n_embed": 24, "projector_type": "linear"},
    "tile_tag": "2D",
    "torch_dtype": "float32",
    "vision_config": {
        "image_size": 320,  # 20 patches a side: more than a window of 14
        "mlp_ratio": 3.7362,
        "model_name": "deeplip_b_l",
        "model_type": "vision",
        "width": {"clip-l-14-224": CLIP, "sam_vit_b": SAM},
    },
    **{key: value for key, value in TEXT.items() if key not in ("architectures", "auto_map")},
    "image_token_id": IMAGE_TOKEN_ID,  # only here, for the small vocabulary
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the published files' tensors, with the sizes of `config`."""
    text, vision = config["language_config"], config["vision_config"]
    sam, clip = vision["width"]["sam_vit_b"], vision["width"]["clip-l-14-224"]
    hidden, width, inner = text["hidden_size"], sam["width"], 4 * sam["width"]
    side, dim = vision["image_size"] // 16, width // sam["heads"]
    result: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (text["vocab_size"], hidden),
        "model.embed_tokens.weight": (text["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "model.image_newline": (hidden,),
        "model.view_seperator": (hidden,),
        "model.projector.layers.weight": (hidden, config["projector_config"]["input_dim"]),
        "model.projector.layers.bias": (hidden,),
        "model.sam_model.pos_embed": (1, side, side, width),
        "model.sam_model.patch_embed.proj.weight": (width, 3, 16, 16),
        "model.sam_model.patch_embed.proj.bias": (width,),
        "model.sam_model.neck.0.weight": (256, width, 1, 1),
        "model.sam_model.neck.1.weight": (256,),
        "model.sam_model.neck.1.bias": (256,),
        "model.sam_model.neck.2.weight": (256, 256, 3, 3),
        "model.sam_model.neck.3.weight": (256,),
        "model.sam_model.neck.3.bias": (256,),
        "model.sam_model.net_2.weight": (sam["downsample_channels"][0], 256, 3, 3),
        "model.sam_model.net_3.weight": (*sam["downsample_channels"][::-1], 3, 3),
    }
    for i in range(sam["layers"]):
        distances = 2 * (side if i in sam["global_attn_indexes"] else 14) - 1
        result |= {
            f"model.sam_model.blocks.{i}.{name}": shape
            for name, shape in {
                "norm1.weight": (width,),
                "norm1.bias": (width,),
                "norm2.weight": (width,),
                "norm2.bias": (width,),
                "attn.qkv.weight": (3 * width, width),
                "attn.qkv.bias": (3 * width,),
                "attn.proj.weight": (width, width),
                "attn.proj.bias": (width,),
                "attn.rel_pos_h": (distances, dim),
                "attn.rel_pos_w": (distances, dim),
                "mlp.lin1.weight": (inner, width),
                "mlp.lin1.bias": (inner,),
                "mlp.lin2.weight": (width, inner),
                "mlp.lin2.bias": (width,),
            }.items()
        }
    width, positions = clip["width"], (clip["image_size"] // clip["patch_size"]) ** 2 + 1
    result |= {
        "model.vision_model.embeddings.class_embedding": (width,),
        "model.vision_model.embeddings.patch_embedding.weight": (width, 3, clip["patch_size"], clip["patch_size"]),
        "model.vision_model.embeddings.position_embedding.weight": (positions, width),
        "model.vision_model.pre_layrnorm.weight": (width,),
        "model.vision_model.pre_layrnorm.bias": (width,),
    }
    for i in range(clip["layers"]):
        result |= {
            f"model.vision_model.transformer.layers.{i}.{name}.{kind}": shape[: 1 if kind == "bias" else None]
            for name, shape in {
                "layer_norm1": (width,),
                "layer_norm2": (width,),
                "self_attn.qkv_proj": (3 * width, width),
                "self_attn.out_proj": (width, width),
                "mlp.fc1": (4 * width, width),
                "mlp.fc2": (width, 4 * width),
            }.items()
            for kind in ("weight", "bias")
        }
    for i in range(text["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        result |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        result |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        inner = text["moe_intermediate_size"]
        mlps = {"mlp.shared_experts": inner * text["n_shared_experts"]}
        mlps |= {f"mlp.experts.{e}": inner for e in range(text["n_routed_experts"])}
        if i < text["first_k_dense_replace"]:
            mlps = {"mlp": text["intermediate_size"]}
        else:
            result[f"{layer}.mlp.gate.weight"] = (text["n_routed_experts"], hidden)
        for name, size in mlps.items():
            result |= {f"{layer}.{name}.{half}_proj.weight": (size, hidden) for half in ("gate", "up")}
            result[f"{layer}.{name}.down_proj.weight"] = (hidden, size)
    return result


def write_checkpoint(folder: Path) -> Tensors:
    """Write the tiny checkpoint into `folder` and return its tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes(CONFIG).items():
        noise = torch.randn(shape, generator=generator)
        if ("norm" in name and name.endswith("weight")) or ".neck.1.weight" in name or ".neck.3.weight" in name:
            tensors[name] = 1 + 0.3 * noise
        elif len(shape) == 1:
            tensors[name] = 0.5 * noise
        else:
            tensors[name] = noise * (
                0.7 if "embed" in name or name == "lm_head.weight" else 1.2 / math.prod(shape[1:]) ** 0.5
            )
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tensors


def below(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def affine(x: torch.Tensor, t: Tensors, name: str) -> torch.Tensor:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.tensor(0.0))


def layer_norm(x: torch.Tensor, t: Tensors, name: str, eps: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)


def distance(table: torch.Tensor, i: int, j: int, side: int) -> torch.Tensor:
    if len(table) != 2 * side - 1:
        table = F.interpolate(table.T[None], size=2 * side - 1, mode="linear")[0].T
    return table[i - j + side - 1]


def sam_attention(x: torch.Tensor, t: Tensors, heads: int) -> torch.Tensor:
    """Compute SAM's attention of x `[side, side, C]`."""
    side, _, width = x.shape
    dim, out = width // heads, []
    q, k, v = affine(x.reshape(side * side, width), t, "attn.qkv").view(-1, 3, heads, dim).unbind(1)
    rows = torch.stack(
        [torch.stack([distance(t["attn.rel_pos_h"], i, j, side) for j in range(side)]) for i in range(side)]
    )
    columns = torch.stack(
        [torch.stack([distance(t["attn.rel_pos_w"], i, j, side) for j in range(side)]) for i in range(side)]
    )
    for head in range(heads):
        grid = q[:, head].view(side, side, dim)
        of_row = torch.einsum("hwd,hkd->hwk", grid, rows).reshape(side * side, side, 1)
        of_column = torch.einsum("hwd,wkd->hwk", grid, columns).reshape(side * side, 1, side)
        bias = (of_row + of_column).reshape(side * side, side * side)
        out.append((q[:, head] @ k[:, head].T * dim**-0.5 + bias).softmax(-1) @ v[:, head])
    return affine(torch.cat(out, -1), t, "attn.proj").view(side, side, width)


def resized(table: torch.Tensor, side: int) -> torch.Tensor:
    """Resize `[side0, side0, C]` to `[side, side, C]`."""
    if len(table) == side:
        return table
    return F.interpolate(table.permute(2, 0, 1)[None], size=(side, side), mode="bicubic", antialias=True)[0].permute(
        1, 2, 0
    )


def sam(pixels: torch.Tensor, t: Tensors, config: dict[str, Any]) -> torch.Tensor:
    """Encode pixels `[3, side, side]` to `[side / 64, side / 64, C]`."""
    x = F.conv2d(pixels[None], t["patch_embed.proj.weight"], t["patch_embed.proj.bias"], stride=16)[0].permute(1, 2, 0)
    side = len(x)
    x = x + resized(t["pos_embed"][0], side)
    for i in range(config["layers"]):
        layer = below(t, f"blocks.{i}.")
        y = layer_norm(x, layer, "norm1", 1e-6)
        if i in config["global_attn_indexes"]:
            y = sam_attention(y, layer, config["heads"])
        else:
            whole = -(-side // 14) * 14
            padded = F.pad(y, (0, 0, 0, whole - side, 0, whole - side))
            for top in range(0, whole, 14):
                for left in range(0, whole, 14):
                    window = padded[top : top + 14, left : left + 14].clone()
                    padded[top : top + 14, left : left + 14] = sam_attention(window, layer, config["heads"])
            y = padded[:side, :side]
        x = x + y
        x = x + affine(F.gelu(affine(layer_norm(x, layer, "norm2", 1e-6), layer, "mlp.lin1")), layer, "mlp.lin2")
    for conv, norm in (("neck.0", "neck.1"), ("neck.2", "neck.3")):
        weight = t[f"{conv}.weight"]
        x = F.conv2d(x.permute(2, 0, 1)[None], weight, padding=weight.shape[-1] // 2)[0].permute(1, 2, 0)
        x = layer_norm(x, t, norm, 1e-6)
    for conv in ("net_2", "net_3"):
        x = F.conv2d(x.permute(2, 0, 1)[None], t[f"{conv}.weight"], stride=2, padding=1)[0].permute(1, 2, 0)
    return x


def clip(features: torch.Tensor, t: Tensors, config: dict[str, Any]) -> torch.Tensor:
    """Encode features `[side, side, C]` to `[side * side, C]`."""
    side, _, width = features.shape
    table, dim = t["embeddings.position_embedding.weight"], width // config["heads"]
    old = math.isqrt(len(table) - 1)
    first = t["embeddings.class_embedding"] + table[0]
    x = torch.cat((first[None], (features + resized(table[1:].view(old, old, width), side)).reshape(-1, width)))
    x = layer_norm(x, t, "pre_layrnorm", 1e-5)
    for i in range(config["layers"]):
        layer = below(t, f"transformer.layers.{i}.")
        qkv = affine(layer_norm(x, layer, "layer_norm1", 1e-5), layer, "self_attn.qkv_proj").view(
            -1, 3, config["heads"], dim
        )
        heads = [
            (q @ k.T * dim**-0.5).softmax(-1) @ v
            for q, k, v in (qkv[:, :, h].unbind(1) for h in range(config["heads"]))
        ]
        x = x + affine(torch.cat(heads, -1), layer, "self_attn.out_proj")
        inner = affine(layer_norm(x, layer, "layer_norm2", 1e-5), layer, "mlp.fc1")
        x = x + affine(inner * torch.sigmoid(1.702 * inner), layer, "mlp.fc2")
    return x[1:]


def square(pixels: torch.Tensor, t: Tensors) -> torch.Tensor:
    """Return the embeddings of bytes `[side, side, 3]`: `[n, n, H]`."""
    widths = CONFIG["vision_config"]["width"]
    scaled = (pixels.permute(2, 0, 1) / 255 - 0.5) / 0.5
    first = sam(scaled, below(t, "model.sam_model."), widths["sam_vit_b"])
    second = clip(first, below(t, "model.vision_model."), widths["clip-l-14-224"])
    features = torch.cat((second, first.flatten(0, 1)), -1)
    return affine(features, t, "model.projector.layers").view(*first.shape[:2], -1)


def page(t: Tensors, features: Tensors) -> torch.Tensor:
    """Return the embeddings of one image: rows of the tiles, rows of the view, and the separator."""
    newline, rows = t["model.image_newline"], []
    if "pixel_values_local" in features:
        columns, num_rows = features["grid"].tolist()
        tiles = [square(tile, t) for tile in features["pixel_values_local"]]
        for r in range(num_rows):
            for i in range(len(tiles[0])):
                rows += [*(vector for c in range(columns) for vector in tiles[r * columns + c][i]), newline]
    for row in square(features["pixel_values"][0], t):
        rows += [*row, newline]
    return torch.stack([*rows, t["model.view_seperator"]])


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def mlp(x: torch.Tensor, t: Tensors, name: str) -> torch.Tensor:
    return affine(F.silu(affine(x, t, f"{name}.gate_proj")) * affine(x, t, f"{name}.up_proj"), t, f"{name}.down_proj")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate x `[T, D]`: entry i with entry i + D / 2."""
    half = x.shape[1] // 2
    angles = torch.arange(len(x))[:, None] / 1e4 ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((x[:, :half] * cos - x[:, half:] * sin, x[:, half:] * cos + x[:, :half] * sin), -1)


@torch.inference_mode()
def logits(t: Tensors, token_ids: list[int], pages: list[Tensors]) -> torch.Tensor:
    """Return the logits after every token, `[T, V]`. The k-th run of image tokens stands for the k-th page."""
    ids = torch.tensor(token_ids)
    x = t["model.embed_tokens.weight"][ids].clone()
    if pages:
        x[ids == IMAGE_TOKEN_ID] = torch.cat([page(t, features) for features in pages])
    heads = TEXT["num_attention_heads"]
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for i in range(TEXT["num_hidden_layers"]):
        layer = below(t, f"model.layers.{i}.")
        normed = rms(x, layer["input_layernorm.weight"])
        q, k, v = (affine(normed, layer, f"self_attn.{name}_proj").view(len(ids), heads, -1) for name in "qkv")
        out = []
        for head in range(heads):
            scores = rotated(q[:, head]) @ rotated(k[:, head]).T * q.shape[-1] ** -0.5
            out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, head])
        x = x + affine(torch.cat(out, -1), layer, "self_attn.o_proj")
        normed = rms(x, layer["post_attention_layernorm.weight"])
        if i < TEXT["first_k_dense_replace"]:
            x = x + mlp(normed, layer, "mlp")
            continue
        weights, chosen = affine(normed, layer, "mlp.gate").softmax(-1).topk(TEXT["num_experts_per_tok"])
        routed = [
            sum(w * mlp(token, layer, f"mlp.experts.{e}") for w, e in zip(ws, es.tolist()))
            for token, ws, es in zip(normed, weights, chosen)
        ]
        x = x + torch.stack(routed) + mlp(normed, layer, "mlp.shared_experts")
    return affine(rms(x, t["model.norm.weight"]), t, "lm_head")
