"""Draws the weights of tiny checkpoints."""

from __future__ import annotations

from typing import Any


def redraw(model: Any, seed: int = 0) -> None:
    """Draw weights large enough for every part to matter, and norms, biases and sinks away from their defaults."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("A_log", "dt_bias")):
            continue
        if parameter.dim() == 1 or (parameter.dim() == 2 and "norm" in name):
            parameter.data.add_(0.3 * noise)
        elif "embed" in name or "wte" in name or "lm_head" in name:
            parameter.data.copy_(noise * 0.7)
        else:
            parameter.data.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "e_score_correction_bias", "expert_bias", "rotary_emb.alpha")):
            buffer.add_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("balancing_biases"):  # transformers sets the last one, for no expert, to -1 when it loads
            buffer[:-1] = 0.3 * torch.randn(len(buffer) - 1, generator=generator) - 1
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), 8, generator=generator).argsort(1)[:, : buffer.shape[1]])
