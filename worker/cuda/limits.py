"""Limits of a GPU on the tiles of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    capability: int  # 90 for compute capability 9.0
    shared: int  # bytes of shared memory that a block may have


# bytes of shared memory by capability (CUDA C++ Programming Guide, section 20.2)
KNOWN = {80: Limits(80, 163 << 10), 90: Limits(90, 227 << 10), 100: Limits(100, 227 << 10)}


@cache
def of(device: torch.device) -> Limits:
    """The limits of a GPU; off a GPU, where kernels are interpreted, those of an H100."""
    if device.type != "cuda":
        return KNOWN[90]
    major, minor = torch.cuda.get_device_capability(device)
    return Limits(10 * major + minor, torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
