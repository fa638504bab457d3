"""Makes random LoRA adapters in PEFT's format, and the reference: transformers with merged weights."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoints.lora_files import content_hash
from quire.engine.messages import LoraUse
from tests.helpers.models.checkpoints import load_reference

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: str,
    rank: int = 8,
    seed: int = 0,
    targets: tuple[str, ...] = ALL,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for the model in the folder `model`; `config` are other keys of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * 2, "target_modules": list(targets)} | config
    tensors = {}
    for name, module in load_reference(model).named_modules():
        if name.split(".")[-1] in targets and hasattr(module, "weight"):
            out, inner = module.weight.shape
            r = (settings.get("rank_pattern") or {}).get(name.split(".")[-1], rank)
            a = torch.randn(r, inner, generator=generator) / math.sqrt(inner)
            b = torch.randn(out, r, generator=generator) * strength / math.sqrt(r)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    write_adapter(folder, settings, tensors)
    return folder


def make_expert_adapter(
    folder: Path, model: str, rank: int = 4, seed: int = 0, stacked: bool = False, some: bool = True
) -> Path:
    """Write an adapter for all experts: as modules of their own, or for the tensors of all experts. With `some`, every
    other expert has no matrices of its gate.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors, names = {}, ("gate_proj", "up_proj", "down_proj")

    def add(module: str, out: int, inner: int, r: int) -> None:
        a = torch.randn(r, inner, generator=generator) / math.sqrt(inner)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        b = torch.randn(out, r, generator=generator) / math.sqrt(rank)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b

    for name, module in load_reference(model).named_modules():
        if name.endswith(".experts"):
            num, hidden, size = _expert_sizes(module)
            if stacked:  # PEFT wraps the module once per parameter
                add(f"{name}.base_layer", 2 * size, hidden, rank * num)
                add(name, hidden, size, rank * num)
            else:
                for expert in range(num):
                    for projection in names[expert % 2 if some else 0 :]:
                        shape = (hidden, size) if projection == "down_proj" else (size, hidden)
                        add(f"{name}.{expert}.{projection}", *shape, rank)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(names)}
    if stacked:
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        settings |= {"target_modules": [], "target_parameters": parameters}
    write_adapter(folder, settings, tensors)
    return folder


def _expert_sizes(experts: torch.nn.Module) -> tuple[int, int, int]:
    """Return (number, hidden size, intermediate size) of transformers' stacked experts."""
    num, one, other = experts.down_proj.shape
    return (num, other, one) if _is_transposed(experts) else (num, one, other)


def _is_transposed(experts: torch.nn.Module) -> bool:
    """Return whether the tensors are [E, in, out]: then gate and up, which are twice as wide, are last."""
    return experts.gate_up_proj.shape[2] == 2 * experts.down_proj.shape[1]


def _add_to_experts(experts: torch.nn.Module, below: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add B A to the tensors of all experts. `below` is the rest of the module's name, e.g. 3.gate_proj."""
    num, hidden, size = _expert_sizes(experts)
    transposed = _is_transposed(experts)
    if below in ("", "base_layer"):
        delta = torch.einsum("o r e, e r i -> e o i", b.unflatten(1, (-1, num)), a.unflatten(0, (num, -1)))
        parameter = experts.gate_up_proj if delta.shape[2] == hidden else experts.down_proj
        parameter += delta.transpose(1, 2) if transposed else delta
        return
    expert, projection = below.split(".")
    assert not transposed
    if projection == "down_proj":
        experts.down_proj[int(expert)] += b @ a
    else:
        start = size if projection == "up_proj" else 0
        experts.gate_up_proj[int(expert), start : start + size] += b @ a


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def as_gguf(adapter: Path, path: Path, arch: str, heads: tuple[int, int]) -> Path:
    """Convert a PEFT adapter as llama.cpp's converter does. `heads` are the numbers of heads of q and k."""
    import gguf

    from tests.helpers.models.gguf_files import swapped

    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    writer, stacks = gguf.GGUFWriter(path, arch), {}
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for name, tensor in tensors.items():
        module, side = re.fullmatch(r"base_model\.model\.model\.layers\.(.+)\.lora_(.)\.weight", name).groups()
        layer, _, inner = module.partition(".")
        weight = tensor.float().numpy()
        if match := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj", inner):
            stacks.setdefault(f"blk.{layer}.ffn_{match[2]}_exps.weight.lora_{side.lower()}", []).append(weight)
            continue
        if arch == "llama" and side == "B" and inner.endswith(("q_proj", "k_proj")):
            weight = swapped(weight, heads[inner.endswith("k_proj")])
        writer.add_tensor(f"blk.{layer}.{_GGUF_NAMES[inner]}.weight.lora_{side.lower()}", weight)
    for name, parts in stacks.items():
        writer.add_tensor(name, np.stack(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(model: str, *adapters: tuple[Path, float]) -> torch.nn.Module:
    """Return the model after adding `scale` times the product of each adapter's matrices to its weights, in float32."""
    reference = load_reference(model)
    modules = dict(reference.named_modules())
    for folder, factor in adapters:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        for name in (name for name in tensors if ".lora_A." in name):
            a, b = tensors[name].float(), tensors[name.replace(".lora_A.", ".lora_B.")].float()
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            alpha = (config.get("alpha_pattern") or {}).get(module.split(".")[-1], config["lora_alpha"])
            holder, is_expert, below = module.partition(".experts")
            rank = config["r"] if is_expert else len(a)
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            with torch.no_grad():
                if is_expert:
                    _add_to_experts(modules[f"{holder}.experts"], below.removeprefix("."), a, factor * scale * b)
                else:
                    modules[module].weight += factor * scale * (b @ a)
    return reference


def use(folder: Path, scale: float = 1.0) -> LoraUse:
    return LoraUse(content_hash(folder), str(folder), scale)
