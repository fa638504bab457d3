"""The only entry point to the native CPU kernels: loads or builds the library and returns its operations.

Call `load` once at start. While a background build is running (`building`), plain torch serves. `poll`
returns True when the library is loaded; from then on `native_ops` returns its operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quire.worker.cpu import ops, states
from quire.worker.cpu.argmax_prefilter import BytesArgmaxPrefilter, Int8ArgmaxPrefilter
from quire.worker.cpu.blocks import packed_blocks
from quire.worker.cpu.build import BuildError
from quire.worker.cpu.experts import NativeExperts
from quire.worker.cpu.lora import add_native
from quire.worker.cpu.native import KERNELS
from quire.worker.cpu.native_linear import QuantizedLinear
from quire.worker.cpu.packed_linear import NativeQuantMethod, PackedMethod
from quire.worker.cpu.segments import Segments
from quire.worker.layers.activation import relu2
from quire.worker.layers.linear import Linear, LinearMethod
from quire.worker.layers.quantization.int_groups import E4M3, Groups
from quire.worker.platforms.ops import Ops

if TYPE_CHECKING:
    from torch import nn

    from quire.worker.layers.moe import ListedExperts
    from quire.worker.layers.norm import Norm
    from quire.worker.layers.quantization.blocks import Rows
    from quire.worker.platforms.step_tensors import StepTensors
    from quire.worker.spec.moe import RoutingSpec


class NativeOps(Ops):
    """The operations of the loaded library. Layers, weights and shapes that it does not support stay with torch."""

    name = "native"
    takes = frozenset({E4M3})

    @property
    def adapter_copies(self) -> int:
        return 3 if KERNELS.level == "amx" else 1  # ranks of tiles are multiples of 16

    silu_and_mul = staticmethod(ops.silu_and_mul)
    rms_norm = staticmethod(ops.rms_norm)
    add_rms_norm = staticmethod(ops.add_rms_norm)
    qk_norm_rope_write = staticmethod(ops.qk_norm_rope_write)
    causal_conv = staticmethod(states.causal_conv)
    gated_delta_rule = staticmethod(states.gated_delta_rule)
    delta_inputs = staticmethod(states.delta_inputs)
    gated_norm = staticmethod(states.gated_norm)
    sigmoid_gate = staticmethod(states.sigmoid_gate)
    linear_attention = staticmethod(states.scan)
    selective_scan = staticmethod(states.selective_scan)
    float_linear = staticmethod(states.float_linear)
    add_lora = staticmethod(add_native)

    def linear_method(self, layer: Linear) -> LinearMethod | None:
        return PackedMethod(layer) if layer.weight.dtype == torch.bfloat16 else None

    def quantize_weight(self, layer: Linear, bits: int, group: int) -> LinearMethod:
        linear = QuantizedLinear.quantize(layer.weight, bits, group, layer.bias, layer.gated, _narrow(bits == 4))
        return NativeQuantMethod(layer, linear)

    def quantized_method(self, layer: Linear, groups: Groups) -> LinearMethod | None:
        if not QuantizedLinear.supports(groups.group, groups.scales.shape[1]):
            return None
        offsets = None if groups.zeros is None else -groups.zeros.float() * groups.scales.float()
        group = groups.group if groups.scales.shape[1] > 1 else -1
        numbers = groups.values, groups.scales, offsets, groups.bits, group
        narrow = _narrow(groups.bits == 4)
        linear = QuantizedLinear.from_values(*numbers, layer.bias, layer.gated, narrow)
        layer.zeros = None  # the offsets are packed
        return NativeQuantMethod(layer, linear)

    def blocks_method(self, layer: Linear, parts: list[Rows]) -> LinearMethod:
        linear = packed_blocks(layer, parts, _narrow(True))
        for i in range(len(parts)):
            setattr(layer, f"blocks_{i}", None)
        return NativeQuantMethod(layer, linear)

    @staticmethod
    def route(
        spec: RoutingSpec,
        logits: torch.Tensor,
        correction: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        native = spec.has_kernels and not spec.bounds_groups
        return (ops.route if native else Ops.route)(spec, logits, correction, bias)

    def packed_experts(self, experts: ListedExperts) -> NativeExperts | None:
        listed = experts.experts.values()
        if not experts.gated and any(one.activation is not relu2 for one in listed):
            return None
        first = [one.gate_up_proj if experts.gated else one.up_proj for one in listed]
        down = [one.down_proj for one in listed]
        return NativeExperts.from_layers(first, down, experts.local.start, experts.weigh_inputs, not experts.gated)

    def argmax_prefilter(self, head: Linear) -> Int8ArgmaxPrefilter | None:
        if isinstance(head.method, PackedMethod):
            return Int8ArgmaxPrefilter.from_linear(head.method.linear)
        if isinstance(head.method, NativeQuantMethod) and len(head.method.parts) == 1:
            return BytesArgmaxPrefilter.from_linear(head.method.parts[0])
        return None

    def fused_layers(
        self, layers: Sequence[nn.Module], final_norm: Norm, tables: Sequence[torch.Tensor | None]
    ) -> Segments | None:
        return Segments.from_layers(layers, final_norm, tables)

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        floats: torch.Tensor,
        ints: torch.Tensor,
    ) -> torch.Tensor:
        return ops.sample(logits, rows, positions, floats, ints)

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ops.logprobs(logits, token_ids, num, normalize)

    def fill_inputs(
        self,
        packed: torch.Tensor,
        sizes: list[int],
        tokens: torch.Tensor,
        blocks: torch.Tensor,
        block_size: int,
        tensors: StepTensors,
        arange: torch.Tensor,
        max_query_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_reqs, num_samples = sizes[0], sizes[4]
        sampling = ops.fill_inputs(packed, num_reqs, num_samples, tokens, blocks, block_size, tensors)
        tensors.pad(num_reqs)
        return sampling

    def exclude_by_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        ops.exclude_by_bitmask(logits, rows, masks)

    def append_tokens(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        max_position: int,
    ) -> None:
        ops.append_tokens(tokens, rows, positions, token_ids)


_NATIVE = NativeOps()  # stateless


def _narrow(by_default: bool) -> bool:
    """Return whether products with a quantized weight round activations to 8 bits."""
    return by_default if KERNELS.activation_bits is None else KERNELS.activation_bits == 8


def load(background: bool = True, level: str = "auto", activation_bits: str = "auto", preview: bool = False) -> None:
    """Load the library or start a background build of it; with background=False build it in this process; with
    `preview` build nothing. `activation_bits` is the setting `cpu_activation_bits`.

    Raises:
        ValueError: the build failed, or the CPU does not support the instruction set `level`.
    """
    KERNELS.activation_bits = None if activation_bits == "auto" else int(activation_bits)
    try:
        KERNELS.load(background, level, preview)
    except BuildError as error:
        raise ValueError(f"the native CPU kernels are needed and cannot be compiled: {error}") from error


def native_ops() -> NativeOps | None:
    """Return the operations of the library, or None if it is not loaded."""
    return None if KERNELS.lib is None else _NATIVE


def set_threads(count: int) -> None:
    """Set the number of threads of torch in the calling thread, and of the library if it is loaded."""
    torch.set_num_threads(count)
    if KERNELS.lib is not None:
        KERNELS.lib.quire_set_threads(count)


def building() -> bool:
    """Return whether a background build is running or its end has not been polled yet."""
    return KERNELS.building


def poll() -> bool:
    """Load the library if the background build has succeeded. Returns True exactly once, when it is loaded."""
    return KERNELS.poll()


def give_up(reason: str) -> None:
    """Use no native kernels in this process, and report `reason` in `status`."""
    KERNELS.give_up(reason)


def level() -> tuple[str, str]:
    """Return (the instruction set of the library, why it was chosen)."""
    return KERNELS.level or "none", KERNELS.level_reason


def activation_bits() -> tuple[str, str]:
    """Return (bits of activations in products with quantized weights, why)."""
    if KERNELS.activation_bits is None:
        return "auto", "8 for GGUF files and weights of 4 bits, 16 for other quantized weights"
    return str(KERNELS.activation_bits), "as asked, for quantized weights"


def warning() -> str:
    """Return why kernels will never be available, with the slowdown and the remedy, or ""."""
    return KERNELS.warning


def loaded_at() -> float | None:
    """Return when the library was loaded, by time.time()."""
    return KERNELS.loaded_at


def status() -> str:
    """Return the state of the library, for the log and the table of choices."""
    return KERNELS.status
