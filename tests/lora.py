"""Random LoRA adapters in PEFT's format, and the reference: transformers with the adapter merged into its weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.checkpoints.lora import content_hash
from quire.engine.messages import LoraUse
from tests.checkpoints import load_reference

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
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


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def merged(model: str, *adapters: tuple[Path, float]) -> torch.nn.Module:
    """The model with `scale` times the product of each adapter's matrices added to its weights, in float32."""
    from safetensors.torch import load_file

    reference = load_reference(model)
    modules = dict(reference.named_modules())
    for folder, factor in adapters:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        for name in (name for name in tensors if ".lora_A." in name):
            a, b = tensors[name].float(), tensors[name.replace(".lora_A.", ".lora_B.")].float()
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            alpha = (config.get("alpha_pattern") or {}).get(module.split(".")[-1], config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            with torch.no_grad():
                modules[module].weight += factor * scale * (b @ a)
    return reference


def use(folder: Path, scale: float = 1.0) -> LoraUse:
    return LoraUse(content_hash(folder), str(folder), scale)
