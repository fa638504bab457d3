"""The entry point of the Triton kernels."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.worker.layers.quantization.blocks import Rows
from quire.worker.layers.quantization.int_at_load import quantize
from quire.worker.layers.quantization.int_groups import E4M3, GROUP_SIZE, TABLE, Groups
from quire.worker.layers.quantization.mxfp4_experts import mxfp4_groups
from quire.worker.layers.state import by_stages
from quire.worker.platforms.ops import Ops

if TYPE_CHECKING:
    from quire.worker.layers.linear import Linear, LinearMethod
    from quire.worker.layers.moe import ListedExperts

logger = logging.getLogger(__name__)

# kernels that an image brings (`python -m tools.compile_kernels --cache`)
BAKED = Path(sys.prefix, "share", "quire", "triton")


def keep_compiled() -> None:
    """Keep compiled kernels for later starts in folders of $QUIRE_CACHE, by default ~/.cache/quire, unless the
    libraries' own variables name others. They distinguish kernels by source, variant, compute capability and compiler;
    none depends on the driver.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = os.environ.get("QUIRE_CACHE") or os.path.join(home, "quire")
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(root, "triton"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.join(root, "flash_attn_4"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    link_baked(BAKED, Path(os.environ["TRITON_CACHE_DIR"]))


def link_baked(baked: Path, kept: Path) -> None:
    """Link the kernels in the folder `baked`, one folder each, that the cache in `kept` lacks. An image may hold them:
    its cache is a volume, which hides the image's files.
    """
    if not baked.is_dir():
        return
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for kernel in baked.iterdir():
            place = kept / kernel.name
            if place.is_symlink() and not place.exists():  # of an older image
                place.unlink()
            if not place.exists():
                place.symlink_to(kernel)
    except FileExistsError:  # another rank was faster
        return link_baked(baked, kept)
    except OSError as error:
        logger.warning("compiled kernels in %s are not used: %s", baked, error)


@cache
def triton_ops(device: torch.device) -> Ops | None:
    """Return the operations of the Triton kernels, or None if Triton is missing or cannot compile for `device` (it also
    needs a C compiler). Logs the reason once.
    """
    try:
        from quire.worker.cuda.kernels import triton_ops as kernels

        kernels.rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
        torch.cuda.synchronize(device)
    except Exception as error:  # raised by Triton, by its C compiler or by the driver: use plain torch
        logger.warning("Triton kernels unavailable, using plain torch: %s: %s", type(error).__name__, error)
        return None
    return TritonOps()


class TritonOps(Ops):
    """Triton kernels between the matrix products, for those of experts and of quantized weights; everything else is
    plain torch.
    """

    name = "triton"
    quantized_types = (torch.bfloat16, torch.float16, torch.float32)
    takes = frozenset({E4M3, TABLE, GROUP_SIZE})

    def __init__(self) -> None:
        from quire.worker.cuda.kernels import (
            triton_experts,
            triton_logits,
            triton_lora,
            triton_mla,
            triton_routing,
            triton_sampler,
            triton_state_rows,
            triton_states,
            triton_step,
        )
        from quire.worker.cuda.kernels import triton_ops as kernels

        self.fused_sample = triton_sampler.sample
        self.fused_penalize, self.fused_logprobs = triton_logits.penalize, triton_logits.logprobs
        self.fill_inputs, self.append_tokens = triton_step.fill_inputs, triton_step.append_tokens
        self.write_entries = triton_step.write_entries
        self.exclude_by_bitmask = triton_logits.exclude_by_bitmask
        self.rms_norm, self.add_rms_norm = kernels.rms_norm, kernels.add_rms_norm
        self.route, self.fused_experts = triton_routing.route, triton_experts.fused_experts
        self.add_lora, self.add_lora_slots = triton_lora.add, triton_lora.add_slots
        self.causal_conv, self.selective_scan = triton_states.causal_conv, triton_states.selective_scan
        self.gated_delta_rule = triton_states.gated_delta_rule
        self.linear_attention = triton_states.linear_attention
        self.write_latents, self.rotate_tails = triton_mla.write_latents, triton_mla.rotate_tails
        self.delta_inputs, self.gated_norm = triton_state_rows.delta_inputs, triton_state_rows.gated_norm
        self.state_norm, self.l2_norm = triton_state_rows.state_norm, triton_state_rows.l2_norm
        self.square_sums = triton_state_rows.square_sums
        self._multiplies_floats8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
        self.silu_and_mul, self.qk_norm_rope_write = kernels.silu_and_mul, kernels.qk_norm_rope_write

    def use_packages(self, dtype: torch.dtype) -> None:
        from quire.worker.cuda import fla
        from quire.worker.cuda.kernels import triton_states

        rule = triton_states.gated_delta_rule
        if dtype != torch.float32 and find_spec("fla") is not None:
            rule = by_stages(0, 1, 2, 3, 4, like=2)(fla.DeltaRule(rule, dtype))
        self.gated_delta_rule = rule

    def quantize_weight(self, layer: Linear, bits: int, group: int) -> LinearMethod:
        from quire.worker.cuda.quantized import TritonGroups

        values, scales = quantize(layer.weight, bits)
        groups = Groups(values[:, : layer.in_features].contiguous(), scales, None, bits, group)
        return TritonGroups(layer, groups, layer.weight.dtype)

    def quantized_method(self, layer: Linear, groups: Groups) -> LinearMethod:
        from quire.worker.cuda.quantized import Float8Blocks, Float8Channels, TritonGroups

        if groups.bits == 4 and groups.group % 2 and groups.scales.shape[1] > 1:
            return None  # the two values of a byte may have different scales
        kinds = [kind for kind in (Float8Channels, Float8Blocks) if self._multiplies_floats8 and kind.fits(groups)]
        return (kinds or [TritonGroups])[0](layer, groups, layer.method.dtype)

    def blocks_method(self, layer: Linear, parts: list[Rows]) -> LinearMethod:
        from quire.worker.cuda.quantized import TritonBlocks, TritonGroups

        dtype, num_rows = layer.method.dtype, sum(len(part.blocks) for part in parts)
        if any(part.type != "MXFP4" for part in parts) or num_rows < layer.out_features:
            return TritonBlocks(parts, dtype)
        # blocks of 17 bytes are slow to read
        groups = mxfp4_groups(Rows(torch.cat([part.blocks for part in parts]), "MXFP4"))
        for i in range(len(parts)):
            setattr(layer, f"blocks_{i}", None)
        return TritonGroups(layer, groups, dtype)

    def packed_experts(self, experts: ListedExperts) -> Callable[..., torch.Tensor] | None:
        from quire.worker.cuda.stacks import grouped_experts

        return grouped_experts(experts, self._multiplies_floats8) if experts.gated else None
