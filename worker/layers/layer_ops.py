"""The operations that layers take from a platform: the part of `platforms.ops.Ops` that they call. Layers know this
protocol only, so that no layer imports a platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class LayerOps(Protocol):
    """The operations that layers use; `platforms/ops.py` defines each."""

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_and_mul: Callable[..., torch.Tensor]
    fused_experts: Callable[..., torch.Tensor]
    add_lora: Callable[..., None]
    add_lora_slots: Callable[..., None]
    quantized_types: tuple[torch.dtype, ...]
    takes: frozenset[str]

    def linear_method(self, layer: Any) -> Any: ...

    def quantize_weight(self, layer: Any, bits: int, group: int) -> Any: ...

    def quantized_method(self, layer: Any, groups: Any) -> Any: ...

    def blocks_method(self, layer: Any, parts: list) -> Any: ...

    def argmax_prefilter(self, head: Any) -> Any: ...

    def packed_experts(self, experts: Any) -> Callable[..., torch.Tensor] | None: ...
