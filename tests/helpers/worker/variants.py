"""Records which variants of Triton kernels requests need, without a GPU: an engine on the stand-ins of `launches.py`,
whose launches only record how Triton would specialize their kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from quire.worker import model_runner
from quire.worker.cuda.kernels import limits, triton_mla, triton_paged
from tests.helpers.worker.emulated_gpu import EmulatedGpu, emulated
from tests.helpers.worker.launches import Launches, Platform, interpreter

Variant = tuple  # (kernel, specialization of each argument, options)


def _specialization(value: Any, specialize: bool, align: bool) -> Any:
    """Return the properties of an argument for which Triton compiles a kernel: a type, and for integers and pointers a
    class of values.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.dtype, specialize and align and value.data_ptr() % 16 == 0
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if specialize and value == 1:
            return 1
        return "i32" if -(2**31) <= value < 2**31 else "i64", specialize and align and value % 16 == 0
    return type(value).__name__


def variant(kernel: Any, values: dict[str, Any]) -> Variant:
    """Return the variant of an interpreted kernel that a launch with these arguments needs."""
    never, unaligned = (
        set(kernel.kwargs.get(name) or ()) for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    parameters = inspect.signature(kernel.fn).parameters
    parts = []
    for name, parameter in parameters.items():
        if "constexpr" in str(parameter.annotation):
            parts.append((name, "constexpr", values[name]))
        else:
            parts.append((name, _specialization(values[name], name not in never, name not in unaligned)))
    options = sorted((name, value) for name, value in values.items() if name not in parameters)
    return kernel.fn.__name__, tuple(parts), tuple(options)


class _GpuPlatform(Platform, EmulatedGpu):
    """Stands for a device that compiles at first use and records its steps."""

    compiles_at_use = has_graphs = overlaps = True


class _Recorder:
    """Replays by calling the function again."""

    def __call__(self, function):
        function()
        return function

    def pieces(self, function):
        cuts = []
        function(lambda: cuts.append(None))
        return [lambda: None] * (len(cuts) + 1)


class Variants:
    """Collects the variants that launches need in `seen`."""

    def __init__(self) -> None:
        self.seen: dict[Variant, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Make an engine on the CPU run as on a GPU during the block."""
        launches = Launches()

        def run(kernel, *args, grid, warmup, **kwargs):
            key = variant(kernel, dict(zip(kernel.arg_names, args)) | kwargs)
            self.seen[key] = self.seen.get(key, 0) + 1

        def splits(num_programs, max_query_len, max_keys, device):
            if max_query_len > 1:
                return 1
            return max(1, min(triton_paged.MAX_SPLITS, 2 * limits.KNOWN[90].processors // max(1, num_programs)))

        patches = (
            mock.patch.object(interpreter.InterpretedFunction, "run", run),
            mock.patch.object(triton_paged, "default_num_splits", splits),
            mock.patch.object(triton_mla, "default_num_splits", splits),
            mock.patch.object(model_runner, "CudaRecorder", _Recorder),
        )
        with launches.counting(), emulated(_GpuPlatform(launches)):
            triton_paged._plan.cache_clear()  # it depends on the number of splits
            for patch in patches:
                patch.start()
            try:
                yield
            finally:
                for patch in patches:
                    patch.stop()
                triton_paged._plan.cache_clear()
