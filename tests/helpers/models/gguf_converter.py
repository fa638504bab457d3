"""Converts transformers' checkpoints of any family to GGUF, by the rules of llama.cpp's converter: names from the
`gguf` package, rows of q and k interleaved, norms shifted, experts stacked. Also writes the weights that a file stands
for.
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
from safetensors.torch import load_file, save_file

from tests.helpers.models.gguf_files import blocks_of, swapped, unswapped

gguf = pytest.importorskip("gguf")

Array = np.ndarray
ARCHES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
SWAPPED = ("llama", "granite", "granite_swa", "granitemoe", "granitehybrid", "smollm3", "arcee", "mistral3", "deepseek")
SHIFTED = ("gemma", "gemma-embedding", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
ENCODERS = ("bert", "modern-bert", "nomic-bert")
# architecture that the `gguf` package does not know yet -> one with the same names
_NAMED_LIKE = {"granite_swa": "granite", "hy_v3": "exaone-moe", "deepseek32": "glm-dsa", "deepseek2-ocr": "deepseek"}
_NAMED_LIKE |= {"bailingmoe3": "kimi-linear", "mellum": "qwen3moe"}
_LING = {
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    "word_embeddings": "embed_tokens",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}
_STACKED = re.compile(r"(.*\.(?:experts|altup\w*_projections))\.(\d+)\.((?:\w+\.)?(?:weight|bias))")
_ROUTER = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}  # of Gemma 4
# parts of the names of tensors that are stored in float32
_WIDE = ("position", "token_types", "altup", "laurel", "conv", "ssm_a", "ssm_d", "ssm_dt")
# names of parameters that are no module's weight or bias
_BARE = (".layer_scalar", ".correct_output_scale", ".experts.gate_up_proj", ".experts.down_proj")

# parts of a layer that drafts tokens
_DRAFTING = {
    **dict.fromkeys(("fc", "eh_proj"), "eh_proj"),
    **dict.fromkeys(("pre_fc_norm_embedding", "enorm"), "enorm"),
    **dict.fromkeys(("pre_fc_norm_hidden", "hnorm"), "hnorm"),
    **dict.fromkeys(("norm", "shared_head.norm"), "shared_head_norm"),
}


class Converter:
    """Writes `source` to `path`; `kinds` has types of weights by the last part of their GGUF name, and a default. With
    `split_latents`, `kv_b_proj` becomes two tensors, as newer converters do; `fused` makes one of the experts' gate and
    up projections, `fuse_qkv` of q, k and v.
    """

    def __init__(self, source: str, path: Path, arch: str, kinds: dict[str, str], **options: bool):
        self.source, self.arch, self.kinds, self.options = source, arch, kinds, options
        self.config = json.loads(Path(source, "config.json").read_text())
        self.writer = gguf.GGUFWriter(path, arch)
        self.num_layers = num_layers(self.config)
        layers = self.num_layers + num_drafting(self.config)
        self.names = gguf.get_tensor_name_map(ARCHES[_NAMED_LIKE.get(arch, arch)], layers)
        self.plain: dict[str, torch.Tensor] = {}
        self._halves: list[tuple[Array, dict[int, str]]] = []
        self._qkv: dict[str, Array] = {}

    def run(self, metadata: dict[str, Any]) -> None:
        """Write the file, and replace the source's weights by those that the file stands for."""
        for key, value in metadata.items():
            self._write_key(key, value)
        self._write_tokens(self.config["vocab_size"])
        stacks: dict[str, dict[int, str]] = defaultdict(dict)
        weights = load_file(Path(self.source, "model.safetensors"))
        for name, tensor in sorted(weights.items()):
            if match := _STACKED.fullmatch(name):
                stacks[f"{match[1]}.{match[3]}"][int(match[2])] = name
            elif not self._special(name, tensor.float().numpy()):
                self.plain[name] = self._tensor(self._name(name), tensor.float().numpy())
        for name, experts in stacks.items():
            stacked = np.stack([weights[experts[i]].float().numpy() for i in range(len(experts))])
            if self.options.get("fused") and not name.endswith("down_proj.weight"):
                self._fuse(name, stacked, experts)
                continue
            for i, value in enumerate(self._tensor(self._name(name), stacked)):
                self.plain[experts[i]] = value.clone()
        for step in (
            self.writer.write_header_to_file, self.writer.write_kv_data_to_file, self.writer.write_tensors_to_file,
            self.writer.close,
        ):  # fmt: skip
            step()
        found = {name: value.contiguous() for name, value in self.plain.items()}
        assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in weights.items()}
        save_file(found, Path(self.source, "model.safetensors"), {"format": "pt"})

    def _fuse(self, name: str, stacked: Array, experts: dict[int, str]) -> None:
        """Write the experts' gate and up projections, which come in this order, as one tensor."""
        self._halves.append((stacked, experts))
        if len(self._halves) == 1:
            return
        (gate, gates), (up, ups) = self._halves
        self._halves.clear()
        name = self._name(name).replace("ffn_up_exps", "ffn_gate_up_exps")
        for i, value in enumerate(self._tensor(name, np.concatenate((gate, up), 1))):
            self.plain[gates[i]], self.plain[ups[i]] = (half.clone() for half in value.chunk(2))

    def _name(self, name: str) -> str:
        if self.arch in ENCODERS:
            name = re.sub(r"^(bert|roberta|nomic_bert|model)\.", "", name)
            name = re.sub(r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1", name)
        elif name.startswith(("layers.", "embed_tokens.", "norm.")):  # of a model without an output head
            name = f"model.{name}"
        if self.arch == "bailingmoe3":
            if match := re.fullmatch(r"model\.layers\.(\d+)\.attention\.([fg])_proj\.weight", name):
                full = self.config["layer_types"][int(match[1])] == "full_attention"
                return f"blk.{match[1]}.{'attn_gate' if full else f'ssm_{match[2]}_a'}.weight"
            for theirs, ours in _LING.items():
                name = name.replace(theirs, ours)
        name = re.sub(r"^mtp\.layers\.(\d+)\.", lambda match: f"model.layers.{self.num_layers + int(match[1])}.", name)
        # layers that draft tokens come after the others
        match = re.fullmatch(r"(?:mtp|model\.layers\.(\d+))\.(.+)\.weight", name)
        layer = int(match[1] or self.num_layers) if match else 0
        if match and layer >= self.num_layers and (part := _DRAFTING.get(match[2])):
            return f"blk.{layer}.nextn.{part}.weight"
        if name.endswith(_BARE):
            name += ".weight"
        if name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith((".A_log", ".D")):
            found = self.names.get_name(name)
            assert found, name
            return found
        if match := re.fullmatch(r"(model\.layers\.\d+)\.feed_forward\.experts\.w([123])\.weight", name):
            name = f"{match[1]}.mlp.experts.{('gate', 'down', 'up')[int(match[2]) - 1]}_proj.weight"
        if match := re.fullmatch(r"backbone(\.layers\.\d+)\.mixer(\.experts\..+)", name):
            name = f"model{match[1]}.mlp{match[2]}"
        if name.endswith((".sinks", ".attention_sink_bias")):
            return f"blk.{name.split('.')[2]}.attn_sinks.weight"
        if name.endswith(".expert_bias") and self.arch in ("afmoe", "lfm2moe"):
            return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        if name.endswith(".expert_bias"):  # of Hunyuan 3, which the converter writes without an end
            return f"blk.{name.split('.')[2]}.exp_probs_b"
        name = re.sub(r"e_score_correction_bias$", "e_score_correction.bias", name)
        found = self.names.get_name(name, (".weight", ".bias")) or self.names.get_name(f"{name}.weight", (".weight",))
        assert found, name
        only_shared = self.arch == "granitehybrid" and not self.config["num_local_experts"]
        return found.replace("_shexp", "") if only_shared else found

    def _tensor(self, name: str, value: Array) -> torch.Tensor:
        """Write one tensor; returns the values that it stands for."""
        forward, back = self._change(name)
        stored = forward(value)
        kind = self.kinds.get(name.split(".")[-2], self.kinds["default"])
        if (
            stored.ndim == 1
            or "gate_inp" in name
            or "norm" in name
            or name.endswith((".bias", ".scale", ".exp_probs_b"))
            or any(part in name for part in _WIDE)
        ):
            kind = "F32"
        if kind in ("F32", "F16"):
            stored = np.ascontiguousarray(stored.astype(np.float16 if kind == "F16" else np.float32))
            self.writer.add_tensor(name, stored)
            return torch.from_numpy(back(stored.astype(np.float32)).copy())
        quantization = gguf.GGMLQuantizationType[kind]
        blocks = blocks_of(np.ascontiguousarray(stored), kind, len(self.plain))
        self.writer.add_tensor(name, blocks, raw_dtype=quantization)
        wide = gguf.quants.dequantize(blocks, quantization).reshape(stored.shape)
        return torch.from_numpy(back(wide).copy())

    def _change(self, name: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """Return the converter's change of a tensor's values, and the inverse."""
        if self.arch in SWAPPED and re.search(r"attn_[qk]\.", name):
            heads = self.config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
            return lambda value: swapped(value, heads), lambda value: unswapped(value, heads)
        if self.arch.startswith("qwen35") and (tiles := self._tiles(name)):
            return tiles
        if self.arch == "falcon-h1" and (scale := self._multiplier(name)) is not None:
            return lambda value: value * scale, lambda value: value / scale
        if name.endswith("ssm_a") and self.arch in ("mamba", "jamba"):  # [channels, entries]
            return lambda value: -np.exp(value), lambda value: np.log(-value)
        if name.endswith("ssm_a") and self.arch == "bailingmoe3":
            return lambda value: np.exp(value).reshape(-1, 1), lambda value: np.log(value).reshape(-1)
        if name.endswith("ssm_a") and self.arch == "kimi-linear":
            return lambda value: -np.exp(value).reshape(-1, 1), lambda value: np.log(-value).reshape(1, 1, -1, 1)
        if name.endswith("ssm_d") and self.arch in ("mamba", "jamba"):
            return lambda value: value, lambda value: value
        if name.endswith("ssm_a"):
            return lambda value: -np.exp(value)[:, None], lambda value: np.log(-value[:, 0])
        if name.endswith("ssm_d"):
            return lambda value: value[:, None], lambda value: value[:, 0]
        if re.search(r"(shortconv\.conv|ssm_conv1d(_[qkv])?)\.weight$", name):
            return lambda value: value[:, 0], lambda value: value[:, None]
        if name.endswith("ssm_norm.weight") and (
            groups := self.config.get("mamba_n_groups") or self.config.get("n_groups")
        ):
            return lambda value: value.reshape(groups, -1), lambda value: value.reshape(-1)
        if self.arch in SHIFTED and name.endswith("norm.weight") and "ssm" not in name:
            return lambda value: value + 1, lambda value: value - 1
        if self.arch == "gpt2" and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name):
            return np.transpose, np.transpose
        return lambda value: value, lambda value: value

    def _tiles(self, name: str) -> tuple[Callable[[Array], Array], Callable[[Array], Array]] | None:
        """Return the reordering of value heads from key head by key head to all first ones, all second ones, and so on.
        """
        c = self.config
        keys, ratio = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
        before, dim = 2 * keys * c["linear_key_head_dim"], c["linear_value_head_dim"]

        def moved(value: Array, first: int, size: int, outer: int, axis: int) -> Array:
            kept, heads = np.split(np.moveaxis(value, axis, 0), [first])
            tiled = heads.reshape(outer, -1, size, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)
            return np.moveaxis(np.concatenate([kept, tiled]), 0, axis)

        sizes = {"attn_qkv": (before, dim), "attn_gate": (0, dim), "ssm_beta": (0, 1), "ssm_alpha": (0, 1),
                 "ssm_dt": (0, 1), "ssm_a": (0, 1), "ssm_conv1d": (before, dim), "ssm_out": (0, dim)}  # fmt: skip
        kind = name.split(".")[2] if name.startswith("blk.") else ""
        if kind not in sizes:
            return None
        axis = 1 if kind == "ssm_out" else 0

        def forward(value: Array) -> Array:
            value = -np.exp(value) if kind == "ssm_a" else value
            tiled = moved(value, *sizes[kind], keys, axis)
            return tiled[:, None] if kind == "ssm_a" else tiled[:, 0] if kind == "ssm_conv1d" else tiled

        def back(value: Array) -> Array:
            value = value[:, 0] if kind == "ssm_a" else value[:, None] if kind == "ssm_conv1d" else value
            value = moved(value, *sizes[kind], ratio, axis)
            return np.log(-value) if kind == "ssm_a" else value

        return forward, back

    def _special(self, name: str, value: Array) -> bool:
        """Write tensors that are split or merged."""
        layer = re.search(r"\.(\d+)\.", name)
        block = f"blk.{layer[1]}" if layer else ""
        if name.endswith("kv_b_proj.weight") and self.options.get("split_latents"):
            self.plain[name] = self._split_latents(block, value)
        elif name.endswith("in_proj_qkvz.weight") and self.options.get("ungrouped", True):
            self.plain[name] = self._ungrouped(block, name, value)
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            halves = np.split(value, 2, 1)
            found = [self._tensor(f"{block}.ffn_{half}_exps.weight", v) for half, v in zip(("gate", "up"), halves)]
            self.plain[name] = torch.cat(found, 1)
        elif name.endswith("shared_mlp.input_linear.weight"):
            halves = zip(("gate", "up"), np.split(value, 2))
            shared = "" if self.config["num_local_experts"] == 0 else "_shexp"
            self.plain[name] = torch.cat([self._tensor(f"{block}.ffn_{half}{shared}.weight", v) for half, v in halves])
        elif self.arch == "gpt-oss" and ".experts." in name:
            self.plain[name] = self._gpt_oss(block, name, value)
        elif self.arch == "llama4" and ".experts." in name:
            self.plain[name] = self._llama4(block, name, value.transpose(0, 2, 1))
        elif end := _ROUTER.get(name.rpartition(".router.")[2]):
            self.plain[name] = self._tensor(f"{block}.{end}", value)
        elif self.options.get("fuse_qkv") and (part := re.search(r"([qkv])_proj\.weight$", name)):
            self._qkv[part[1]] = value
            if part[1] == "v":  # the last one by name
                self._fuse_qkv(name.removesuffix("v_proj.weight"), block)
        elif self.arch == "bert" and name.endswith("position_embeddings.weight") and self._first_position():
            first, kept = np.split(value, [self._first_position()])
            stored = self._tensor("position_embd.weight", kept)
            self.plain[name] = torch.cat((torch.from_numpy(first.copy()), stored))
        elif self.arch in ENCODERS and re.search(r"(^|\.)(pooler|cls|lm_head|decoder)\.", name):
            self.plain[name] = torch.from_numpy(value)  # dropped
        else:
            return False
        return True

    def _ungrouped(self, block: str, name: str, value: Array) -> torch.Tensor:
        """Split q, k, v and z, stored together for each key head, into all q, k and v, and all z."""
        c = self.config
        keys, dim = c["linear_num_key_heads"], c["linear_key_head_dim"]
        wide = c["linear_num_value_heads"] // keys * c["linear_value_head_dim"]
        sizes = [dim, dim, wide, wide]
        parts = np.split(value.reshape(keys, sum(sizes), -1), np.cumsum(sizes)[:-1], 1)
        flat = [part.reshape(-1, value.shape[1]) for part in parts]
        qkv = self._tensor(f"{block}.attn_qkv.weight", np.concatenate(flat[:3]))
        back = [*qkv.split([len(part) for part in flat[:3]]), self._tensor(f"{block}.attn_gate.weight", flat[3])]
        return torch.cat([part.unflatten(0, (keys, -1)) for part in back], 1).flatten(0, 1)

    def _multiplier(self, name: str) -> Any:
        """Return the factor by which the converter of Falcon-H1 multiplies the weight: a number, or one per row."""
        c, kind = self.config, name.removesuffix(".weight").split(".")[-1]
        gate, down = c["mlp_multipliers"] or (1.0, 1.0)
        found = {
            "token_embd": c["embedding_multiplier"],
            "output": c["lm_head_multiplier"],
            "attn_q": c["attention_in_multiplier"],
            "attn_k": c["attention_in_multiplier"] * c["key_multiplier"],
            "attn_v": c["attention_in_multiplier"],
            "attn_output": c["attention_out_multiplier"],
            "ssm_out": c["ssm_out_multiplier"],
            "ffn_gate": gate,
            "ffn_down": down,
        }
        if kind != "ssm_in":
            return found.get(kind)
        inner, shared = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        rows = (inner, inner, shared, shared, c["mamba_n_heads"])
        return np.repeat(c["ssm_multipliers"], rows)[:, None].astype(np.float32) * c["ssm_in_multiplier"]

    def _split_latents(self, block: str, value: Array) -> torch.Tensor:
        config = self.config
        heads, nope, v = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
        keys, values = np.split(value.reshape(heads, nope + v, -1), [nope], 1)
        keys = self._tensor(f"{block}.attn_k_b.weight", keys.transpose(0, 2, 1))
        values = self._tensor(f"{block}.attn_v_b.weight", values)
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

    def _first_position(self) -> int:
        """Return the first position of RoBERTa: the one after that of the padding token."""
        return 0 if self.config["model_type"] == "bert" else self.config["pad_token_id"] + 1

    def _fuse_qkv(self, prefix: str, block: str) -> None:
        def stored(kind: str) -> Array:
            return self._change(f"{block}.attn_{kind}.weight")[0](self._qkv[kind])

        fused = self._tensor(f"{block}.attn_qkv.weight", np.concatenate([stored(kind) for kind in "qkv"])).numpy()
        sizes = [len(self._qkv[kind]) for kind in "qk"]
        for kind, rows in zip("qkv", np.split(fused, np.cumsum(sizes))):
            back = self._change(f"{block}.attn_{kind}.weight")[1]
            self.plain[f"{prefix}{kind}_proj.weight"] = torch.from_numpy(back(rows).copy())

    def _llama4(self, block: str, name: str, value: Array) -> torch.Tensor:
        if "gate_up" not in name:
            found = self._tensor(f"{block}.ffn_down_exps.weight", value)
        else:
            halves = zip(("gate", "up"), np.split(value, 2, 1))
            found = torch.cat([self._tensor(f"{block}.ffn_{half}_exps.weight", v) for half, v in halves], 1)
        return found.transpose(1, 2)

    def _gpt_oss(self, block: str, name: str, value: Array) -> torch.Tensor:
        kind = "bias" if name.endswith("bias") else "weight"
        value = value if kind == "bias" else value.transpose(0, 2, 1)  # [E, in, out] in transformers
        if "gate_up" not in name:
            found = self._tensor(f"{block}.ffn_down_exps.{kind}", value)
        else:
            gate, up = (self._tensor(f"{block}.ffn_{half}_exps.{kind}", value[:, i::2].copy())
                        for i, half in enumerate(("gate", "up")))  # fmt: skip
            found = torch.stack((gate, up), 2).flatten(1, 2)
        return found if kind == "bias" else found.transpose(1, 2)

    def _write_key(self, key: str, value: Any) -> None:
        key = f"{self.arch}.{key}"
        if isinstance(value, bool):
            self.writer.add_bool(key, value)
        elif isinstance(value, str):
            self.writer.add_string(key, value)
        elif isinstance(value, list):
            self.writer.add_array(key, value)
        else:
            (self.writer.add_float32 if isinstance(value, float) else self.writer.add_uint32)(key, value)

    def _write_tokens(self, count: int) -> None:
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list([f"<{i}>" for i in range(count)])
        self.writer.add_token_types([gguf.TokenType.NORMAL] * count)
        self.writer.add_eos_token_id(2)


def num_layers(c: dict[str, Any]) -> int:
    return c.get("num_hidden_layers") or c.get("n_layer") or len(c["layers_block_type"])


def num_drafting(c: dict[str, Any]) -> int:
    return c.get("mtp_num_hidden_layers") or c.get("num_nextn_predict_layers") or 0


def common(c: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of all architectures, from a config.json."""
    if c.get("model_type") in ("mamba", "falcon_mamba", "mamba2"):
        sizes = {"block_count": c["num_hidden_layers"], "embedding_length": c["hidden_size"], "context_length": 1 << 20}
        none = dict.fromkeys(("feed_forward_length", "attention.head_count"), 0)
        return sizes | none | {"attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"]}
    heads = c.get("num_attention_heads") or c["n_head"]
    hidden = c.get("hidden_size") or c["n_embd"]
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    dim = c.get("head_dim") or hidden // heads
    found = {
        "block_count": num_layers(c) + num_drafting(c),
        "context_length": c.get("max_position_embeddings") or c.get("model_max_length") or c["n_positions"],
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": c.get("num_key_value_heads") or heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": int(dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if width := c.get("n_inner") or (4 * hidden if "n_embd" in c else known_width(c)):
        found["feed_forward_length"] = width
    if count := num_drafting(c):
        found["nextn_predict_layers"] = count
    for key in ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if key in c:
            found["attention.layer_norm_epsilon"] = c[key]
    if "rms_norm_eps" in c:
        found["attention.layer_norm_rms_epsilon"] = c["rms_norm_eps"]
    if c.get("sliding_window"):
        found["attention.sliding_window"] = c["sliding_window"]
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        for key in ("beta_fast", "beta_slow"):
            found |= {f"rope.scaling.yarn_{key}": rope[key]} if key in rope else {}
    return found


def known_width(c: dict[str, Any]) -> int | None:
    """Return intermediate_size if the family has it. Published models with experts only lack it in config.json, though
    ours have it; the converter then writes no key.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = c.get("model_type")
    if family in CONFIG_MAPPING and not hasattr(CONFIG_MAPPING[family](), "intermediate_size"):
        return None
    return c.get("intermediate_size")


def experts(c: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of architectures with experts."""

    def first(*keys: str) -> Any:
        return next((c[key] for key in keys if c.get(key) is not None), None)

    used = first("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
    found = {
        "expert_count": first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": max(used) if isinstance(used, list) else used,
    }
    optional = {
        "expert_feed_forward_length": first("moe_intermediate_size"),
        "expert_shared_feed_forward_length": first("shared_expert_intermediate_size"),
        "expert_shared_count": first("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
        "leading_dense_block_count": first("first_k_dense_replace", "moe_layer_start_index"),
        "expert_weights_scale": first("routed_scaling_factor", "router_scaling_factor"),
    }
    return found | {key: value for key, value in optional.items() if value is not None}
