"""Writes checkpoints in the quantized formats of the Hub from the random ones of `models/checkpoints.py`, each with the
weights that it stands for.

Integers and floats are rounded in the simplest way: the tests check how they are stored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

Stored = dict[str, torch.Tensor]
Store = Callable[[str, torch.Tensor], tuple[Stored, torch.Tensor]]  # (name, weight) -> (tensors by suffix, its value)


def write(source: str, folder: Path, config: dict[str, Any], store: Store) -> str:
    """Write `source` with its linear layers stored by `store` to `folder`/quantized, and with the weights that these
    stand for, unquantized, to `folder`/plain. Returns `folder`.
    """
    plain, stored = {}, {}
    for name, tensor in load_file(Path(source, "model.safetensors")).items():
        plain[name] = stored[name] = tensor
        if not name.endswith(("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            continue
        tensors, value = store(name.removesuffix(".weight"), tensor)
        if tensors:
            del stored[name]
            added = {f"{name.removesuffix('.weight')}.{suffix}": t.contiguous() for suffix, t in tensors.items()}
            stored = added | stored
            plain[name] = value.to(tensor.dtype).contiguous()
    for kind, tensors in (("plain", plain), ("quantized", stored)):
        shutil.copytree(source, folder / kind)
        save_file(tensors, folder / kind / "model.safetensors", {"format": "pt"})
    path = folder / "quantized" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return str(folder)


def in_groups(weight: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return the weight as `[rows, groups, group]`, with the last group padded by zeros."""
    group = group or weight.shape[1]
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))


def integers(weight: torch.Tensor, bits: int, group: int | None, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return (values in 0 .. 2 ** bits - 1 `[n, k]`, scales `[n, groups]`, zero points like them)."""
    grouped, top = in_groups(weight.float(), group), 2**bits - 1
    if symmetric:
        scales = grouped.abs().amax(-1) / (top / 2) + 1e-6
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = (high - low) / top + 1e-6
        zeros = (-low / scales).round().clamp(0, top)
    scales = scales.half().float()
    values = (grouped / scales[..., None]).round().add(zeros[..., None]).clamp(0, top)
    return values.flatten(1)[:, : weight.shape[1]].int(), scales, zeros.int()


def pack_columns(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers `[n, k]` into a stream of bits per row, low bits first, in int32 words `[n, ceil(k * bits / 32)]`.
    """
    stream = (values[..., None] >> torch.arange(bits)) & 1
    stream = torch.nn.functional.pad(stream.flatten(1), (0, -values.shape[1] * bits % 32)).long()
    words = (stream.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def compressed_tensors(form: str, targets: str = "Linear", **settings: Any) -> tuple[dict[str, Any], Store]:
    """Return a configuration and a store of the package of that name, whose own `decompress` gives the stored values.
    """
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=[targets], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        state = {"weight": weight, **_parameters(weight, args)}
        tensors = compressor.compress(dict(state), scheme)
        if args.num_bits == 4 and args.type == "float":  # their decompress rounds to bfloat16 on the way
            codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
            scales = compressor._decompress_scale(tensors["weight_scale"], torch.float32)
            wide = dequantize(codes, scales, args=args, global_scale=tensors.get("weight_global_scale"))
            return tensors, wide
        return tensors, compressor.decompress(dict(tensors), scheme)["weight"]

    group = {"targets": [targets], "weights": args.model_dump(mode="json"), "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return config, store


def by_activation(group: int) -> tuple[dict[str, Any], Store]:
    """Store groups of columns that are not neighbours (`actorder` group), which the package no longer writes."""
    config, _ = compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=group)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        k = weight.shape[1]
        group_of = (torch.arange(k) // group)[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        order = group_of.argsort(stable=True)
        values, scales, zeros = integers(weight[:, order], 4, group, True)
        values = values[:, order.argsort()]
        tensors = {
            "weight_packed": pack_columns(values, 4),
            "weight_scale": scales,
            "weight_g_idx": group_of.int(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, (values - zeros[:, group_of]) * scales[:, group_of]

    return config, store


def _parameters(weight: torch.Tensor, args: QuantizationArgs) -> Stored:
    """Return the scales and zero points of a weight."""
    bits, strategy = args.num_bits, str(getattr(args.strategy, "value", args.strategy))
    if str(getattr(args.type, "value", args.type)) == "float":
        largest = 6.0 if bits == 4 else 448.0
        if strategy == "block":
            rows, columns = args.block_structure
            blocks = in_groups(in_groups(weight.abs(), columns).amax(-1).T, rows).amax(-1).T
            return {"weight_scale": blocks / largest}
        sizes = in_groups(weight.abs(), args.group_size).amax(-1) if strategy != "tensor" else weight.abs().max()[None]
        if bits == 4 and args.group_size == 16:
            scale = 448 * 6 / weight.abs().max()[None]
            return {"weight_scale": (sizes / 6 * scale).to(torch.float8_e4m3fn).float(), "weight_global_scale": scale}
        if args.group_size == 32:  # MXFP4, MXFP8
            return {"weight_scale": torch.exp2((sizes / largest).log2().ceil())}
        return {"weight_scale": sizes / largest}
    group = args.group_size if strategy == "group" else None
    if strategy == "tensor":
        return {"weight_scale": weight.abs().max()[None] / (2 ** (bits - 1) - 1)}
    _, scales, zeros = integers(weight, bits, group, args.symmetric)
    found = {"weight_scale": scales.to(weight.dtype)}
    return found if args.symmetric else found | {"weight_zero_point": (zeros - 2 ** (bits - 1)).to(torch.int8)}


def awq(group: int) -> tuple[dict[str, Any], Store]:
    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        values, scales, zeros = integers(weight, 4, group, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def words(entries: torch.Tensor) -> torch.Tensor:  # [rows, entries] -> [entries, rows / 8]
            mixed = entries.T.unflatten(1, (-1, 8))[..., order].flatten(1)
            return pack_columns(mixed, 4)

        wide = (values - zeros.repeat_interleave(group, 1)[:, : values.shape[1]]) * scales.repeat_interleave(group, 1)[
            :, : values.shape[1]
        ]
        return {"qweight": words(values), "qzeros": words(zeros), "scales": scales.T.half()}, wide

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return config, store


def gptq(bits: int, group: int, *, act_order: bool = False, version: int = 1, **more: Any) -> tuple[dict, Store]:
    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        k = weight.shape[1]
        group_of = torch.arange(k) // group
        if act_order:
            group_of = group_of[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        order = group_of.argsort(stable=True)
        sorted_values, scales, zeros = integers(weight[:, order], bits, group, False)
        if version == 1:  # a stored 2 ** bits - 1 stands for 0
            zeros = zeros.clamp(min=1)
        values = torch.empty_like(sorted_values)
        values[:, order] = sorted_values
        wide = (values - zeros[:, group_of]) * scales[:, group_of]
        tensors = {
            "qweight": pack_columns(values, bits).T,
            "qzeros": pack_columns((zeros - int(version == 1)).T, bits),
            "scales": scales.T.half(),
            "g_idx": group_of.int(),
            "bias": torch.zeros(len(weight)).half(),
        }
        return tensors, wide

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return config | more, store


def auto_round(packing: str, config_and_store: tuple[dict[str, Any], Store], **more: Any) -> tuple[dict, Store]:
    """Store the tensors of GPTQ, without g_idx and biases, or of AWQ."""
    config, theirs = config_and_store

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        tensors, value = theirs(name, weight)
        return {key: t for key, t in tensors.items() if key not in ("g_idx", "bias")}, value

    kept = {key: config[key] for key in ("bits", "group_size")} | {"sym": False, "data_type": "int"}
    return {"quant_method": "auto-round", "packing_format": packing, **kept, **more}, store


def quark(weight: dict[str, Any], store: Store, **export: Any) -> tuple[dict[str, Any], Store]:
    """Return a checkpoint of Quark with one scheme; `store` writes the tensors by their names there."""
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "weight_format": "real_quantized", "pack_method": "reorder"} | export,
        "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "*.mlp.gate", "re:.*router"],
    }, store


def renamed(store: Store, names: dict[str, str], change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Store:
    """Store the tensors of `store` whose suffixes `names` has under other names; apply `change` to the first."""

    def other(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        tensors, value = store(name, weight)
        found = {new: tensors[old] for old, new in names.items()}
        if change:
            first = next(iter(found))
            found[first] = change(found[first])
        return found, value

    return other


def quark_int4(symmetric: bool, reorder: bool) -> tuple[dict[str, Any], Store]:
    """Store words along the outputs: unsigned with zero points, or in two's complement without."""
    order = [0, 2, 4, 6, 1, 3, 5, 7] if reorder else list(range(8))

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        values, scales, zeros = integers(weight, 4, 32, symmetric)
        wide = (values - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)

        def words(entries: torch.Tensor) -> torch.Tensor:
            return pack_columns(entries.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

        stored = {"weight": words(values - 8 & 15 if symmetric else values), "weight_scale": scales.T.half()}
        return stored | ({} if symmetric else {"weight_zero_point": words(zeros)}), wide

    weight = {"dtype": "int4" if symmetric else "uint4", "qscheme": "per_group", "group_size": 32}
    pack_method = "reorder" if reorder else "order"
    return quark(weight | {"symmetric": symmetric, "ch_axis": 1, "is_dynamic": False}, store, pack_method=pack_method)


def fp8(block: int | None, **more: Any) -> tuple[dict[str, Any], Store]:
    """Store FP8 with a scale per `block` x `block` values, or per tensor."""
    name_of_scale = "weight_scale" if block is None else "weight_scale_inv"

    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        sizes = weight.abs().max()[None, None]
        if block:
            sizes = in_groups(in_groups(weight.abs(), block).amax(-1).T, block).amax(-1).T
        scales = sizes / 448
        if more.get("scale_fmt") == "ue8m0":
            scales = torch.exp2(scales.log2().ceil()).to(torch.float8_e8m0fnu).float()
        wide = scales
        if block:
            wide = scales.repeat_interleave(block, 0)[: len(weight)].repeat_interleave(block, 1)[:, : weight.shape[1]]
        values = (weight / wide).to(torch.float8_e4m3fn)
        tensors = {"weight": values, name_of_scale: scales if block else scales.flatten()}
        if more.get("scale_fmt") == "ue8m0":
            tensors[name_of_scale] = scales.to(torch.float8_e8m0fnu)
        return tensors | ({} if block else {"input_scale": torch.ones(1)}), values.float() * wide

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    return config | ({"weight_block_size": [block, block]} if block else {}) | more, store


def modelopt_nvfp4() -> tuple[dict[str, Any], Store]:
    def store(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        _, theirs = compressed_tensors(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        )
        tensors, _ = theirs(name, weight)
        scale = 1 / tensors["weight_global_scale"]
        codes = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
        value = codes * (tensors["weight_scale"].float() * scale).repeat_interleave(16, 1)
        return {
            "weight": tensors["weight_packed"],
            "weight_scale": tensors["weight_scale"],
            "weight_scale_2": scale.squeeze(),
            "input_scale": torch.ones(()),
        }, value

    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*norm*"]}, store


# The 16 levels of NF4: quantiles of a normal distribution, scaled to -1 .. 1 (QLoRA, arXiv:2305.14314, appendix E)
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip


# The values of FP4 (e2m1, without infinities), over the largest one
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def bitsandbytes(bits: int, nested: bool = False, kind: str = "nf4") -> tuple[dict[str, Any], Store]:
    def int8(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        scb = weight.abs().amax(1)
        values = (weight / scb[:, None] * 127).round().to(torch.int8)
        tensors = {"weight": values, "SCB": scb, "weight_format": torch.zeros((), dtype=torch.uint8)}
        return tensors, values.float() * (scb[:, None] / 127)

    levels = NF4 if kind == "nf4" else FP4

    def four(name: str, weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        runs = weight.flatten().unflatten(0, (-1, 64))
        absmax = runs.abs().amax(1)
        state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors = {"weight.quant_map": levels.clone()}
        if nested:
            offset = float(absmax.mean())
            table = torch.linspace(-1, 1, 256)
            blocks = in_groups((absmax - offset)[None], 256)[0]
            scales = blocks.abs().amax(1)
            codes = (blocks[..., None] / scales[:, None, None] - table).abs().argmin(-1)
            absmax = (table[codes] * scales[:, None]).flatten()[: len(absmax)] + offset
            codes = codes.flatten()[: len(absmax)].to(torch.uint8)
            tensors |= {"weight.absmax": codes, "weight.nested_absmax": scales, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        else:
            tensors["weight.absmax"] = absmax
        codes = (runs[..., None] / absmax[:, None, None] - levels).abs().argmin(-1)
        wide = (levels[codes] * absmax[:, None]).view(weight.shape)
        codes = codes.flatten().to(torch.uint8)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        packed = (codes[::2] << 4 | codes[1::2])[:, None]
        return tensors | {"weight": packed, f"weight.quant_state.bitsandbytes__{kind}": text}, wide

    if bits == 8:
        return {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}, int8
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return {"quant_method": "bitsandbytes", **settings, "llm_int8_skip_modules": ["lm_head"]}, four
