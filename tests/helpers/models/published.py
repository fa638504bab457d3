"""Changes the files that transformers writes to the form of a family's published files."""

from __future__ import annotations

from pathlib import Path


def _whole_convolutions(path: Path) -> None:
    """Divide the convolution into those of q, k and v; transformers writes thirds."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if ".q_conv1d." in name]:
        names = [name.replace("q_", f"{part}_") for part in "qkv"]
        sizes = [len(tensors[name.replace("_conv1d", "_proj")]) for name in names]
        parts = torch.cat([tensors[name] for name in names]).split(sizes)
        tensors |= {name: part.clone() for name, part in zip(names, parts)}
    save_file(tensors, path, {"format": "pt"})


def _dense_mlp(path: Path) -> None:
    """Name dense MLPs as the published files do; transformers names them like the experts."""
    import re

    from safetensors.torch import load_file, save_file

    dense = re.compile(r"block_sparse_moe\.(?=(gate|up|down)_proj)")
    save_file({dense.sub("mlp.", name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def _gates_of_mlps(path: Path) -> None:
    """Name the gates of MLPs as the published files do; transformers names them like those of attention."""
    from safetensors.torch import load_file, save_file

    gates = {name: name.replace("linear_gate", "gate_proj") for name in load_file(path) if ".mlp." in name}
    save_file({gates.get(name, name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


# changes of the file that transformers writes to the form of the family's published files
PUBLISHED = {"hy_v4": _gates_of_mlps, "kimi_linear": _dense_mlp, "olmo_hybrid": _whole_convolutions}
