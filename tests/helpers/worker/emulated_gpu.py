"""Makes a CPU build and serve models as a GPU does: with Triton's kernels, plain experts in stacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from quire.worker.cpu.device import CpuPlatform
from quire.worker.cuda import fixed_order
from quire.worker.cuda.install import TritonOps
from quire.worker.cuda.triton_backend import TritonPagedBackend
from quire.worker.layers import moe
from quire.worker.startup import resolve


class EmulatedGpu(CpuPlatform):
    """Computes on the CPU by interpreted kernels."""

    name = "emulated"
    attention_order, fixed_attention = ("triton_paged",), fixed_order.BACKEND
    shares_ram = False
    ops = property(lambda self: self.own_ops)

    def __init__(self) -> None:
        self.own_ops = TritonOps()

    def start(self, *args, **kwargs):
        return []

    def poll_ops(self) -> bool:
        return False

    def batch_invariance(self, config, spec, dtype):
        return fixed_order.resolve(config, spec, self.ops)

    def fix_order(self, model) -> None:
        fixed_order.fix_order(model)


class _Experts(moe.ListedExperts):
    """Creates plain experts in stacks, as on a GPU."""

    def __new__(cls, hidden_size, spec, prefix, weights):
        plain = weights.linear(f"{prefix}.0.gate_up_proj") is moe.PLAIN and spec.gated
        return moe.StackedExperts(hidden_size, spec, prefix) if plain else super().__new__(cls)


@contextmanager
def emulated(platform: CpuPlatform) -> Iterator[None]:
    """Start workers on `platform` during the block."""
    with (
        mock.patch.object(resolve, "get_platform", lambda device, rank=0: platform),
        mock.patch.object(TritonPagedBackend, "supports", classmethod(lambda cls, spec: None)),
        mock.patch.object(moe, "ListedExperts", _Experts),
    ):
        yield
