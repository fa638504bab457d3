"""Limits of a GPU on the tiles of a kernel, and how many programs fill it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Limits:
    capability: int  # 90 for compute capability 9.0
    shared: int  # bytes of shared memory that a block may have
    processors: int  # multiprocessors
    flight: int  # bytes that a multiprocessor must have asked for so that memory never waits: its share of bytes per
    # second times the latency of about 0.8 us


# by capability: shared memory of the CUDA C++ Programming Guide (section 20.2); multiprocessors and memory of A100 (2.0
# TB/s), H200 (4.8) and B200 (8)
KNOWN = {
    80: Limits(80, 163 << 10, 108, 15 << 10),
    90: Limits(90, 227 << 10, 132, 28 << 10),
    100: Limits(100, 227 << 10, 148, 42 << 10),
}


@cache
def for_device(device: torch.device) -> Limits:
    """Return the limits of a GPU; off a GPU, where kernels are interpreted, those of an H200."""
    if device.type != "cuda":
        return KNOWN[90]
    (major, minor), properties = torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device)
    near = KNOWN[max((known for known in KNOWN if known <= 10 * major), default=80)]
    return Limits(
        10 * major + minor, properties.shared_memory_per_block_optin, properties.multi_processor_count, near.flight
    )
