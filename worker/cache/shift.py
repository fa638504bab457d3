"""Copies of cache entries to other positions (`worker.messages.Shift`): values as they are, keys rotated back by the
distance. Exact for the tokens' own keys; what the tokens attended to stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.worker.cache.allocation import attention_layers
from quire.worker.cache.storage import KVStorage
from quire.worker.layers.rotary import RotaryEmbedding, apply_rotary
from quire.worker.messages import CacheGroup, Shift
from quire.worker.transformer.config import ModelSpec

# families whose keys depend on their position by one rotary embedding alone, which comes after all norms
FAMILIES = (
    "ArceeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
CHUNK = 4096  # tokens at once


def why_not(spec: ModelSpec, groups: Sequence[CacheGroup], kv: KVStorage, has_draft: bool) -> str:
    """Why the entries of this model cannot be shifted, "" if they can."""
    if spec.architecture not in FAMILIES or spec.implementation != "quire":
        return f"{spec.architecture} is not one of {', '.join(FAMILIES)}"
    if [(group.kind, group.window) for group in groups] != [("full", 0)]:
        return f"some layers of this {spec.architecture} do not attend to all tokens"
    ropes = {layer.rope for layer in spec.layers}
    if None in ropes or len(ropes) != 1 or spec.ropes[ropes.pop()].axes or has_draft:
        return f"the layers of this {spec.architecture} have not one rotary embedding in common"
    if kv.scaled:
        return "the KV cache has 8 bits per entry (--kv-cache-dtype)"
    return ""


class Shifter:
    """Shifts the entries of all layers of a model of this rank."""

    def __init__(self, model: nn.Module):
        self._layers = attention_layers(model)
        self._table = next(module for module in model.modules() if isinstance(module, RotaryEmbedding)).cos_sin_cache

    def apply(self, shifts: Sequence[Shift]) -> None:
        """Make these copies in order, after all work on the cache that was launched."""
        for shift in shifts:
            back = self._back(shift.distance)
            for first in range(0, len(shift.source), CHUNK):
                self._copy(shift.source[first : first + CHUNK], shift.target[first : first + CHUNK], back)

    def _back(self, distance: int) -> torch.Tensor | None:
        """cos and sin `[1, D]` of the rotation back by a distance; the table's have the magnitude of its scaling."""
        if not distance:
            return None
        cos, sin = self._table[distance : distance + 1].chunk(2, -1)
        magnitude = torch.hypot(cos, sin)
        return torch.cat((cos / magnitude, -sin / magnitude), -1)

    def _copy(self, source: list[int], target: list[int], back: torch.Tensor | None) -> None:
        for layer in self._layers:
            if layer.kv_from is not None:
                continue
            size, device = layer.k_cache.shape[1], layer.k_cache.device
            old, new = (torch.tensor(slots, device=device) for slots in (source, target))
            k, v = (cache[old // size, old % size] for cache in (layer.k_cache, layer.v_cache))
            layer.k_cache[new // size, new % size] = k if back is None else apply_rotary(k, back)
            layer.v_cache[new // size, new % size] = v
