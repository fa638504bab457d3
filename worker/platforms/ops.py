"""Operations that a platform may replace, as a class whose methods are plain torch and run on any device.

`worker/cpu` and `worker/cuda` have subclasses that override the operations they compute faster. A model starts with
this class and switches when told to: `model.use(platform.ops)`. General code calls `platform.ops` and never checks
which kernels exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from quire.worker.attention.scaled import KVCache, store
from quire.worker.layers.activation import silu_and_mul
from quire.worker.layers.lora import StepLora, add_lora
from quire.worker.layers.lora_slots import add_lora_slots
from quire.worker.layers.moe import fused_experts
from quire.worker.layers.norm import add_rms_norm, rms_norm
from quire.worker.layers.rotary import apply_rotary
from quire.worker.layers.routing import route
from quire.worker.layers.rowwise import l2_norm, sigmoid_gate
from quire.worker.layers.states.delta_rule import delta_inputs, gated_delta_rule, gated_norm
from quire.worker.layers.states.linear_attention import linear_attention
from quire.worker.layers.states.selective_scan import float_linear, selective_scan
from quire.worker.layers.states.short_conv import causal_conv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from quire.worker.attention.base import GroupedMetadata
    from quire.worker.layers.embedding import ArgmaxPrefilter
    from quire.worker.layers.linear import Linear, LinearMethod
    from quire.worker.layers.moe import ListedExperts
    from quire.worker.layers.norm import Norm
    from quire.worker.layers.quantization.blocks import Rows
    from quire.worker.layers.quantization.int_groups import Groups
    from quire.worker.platforms.step_tensors import StepTensors


class FusedLayers(Protocol):
    """All layers of a decoder as one call."""

    def fits(self, layer: nn.Module) -> bool:
        """Return whether `layer`, the first one, still has the KV cache that this object was built for."""

    def run(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        needed_rows: torch.Tensor | None = None,
        lora: StepLora | None = None,
    ) -> torch.Tensor:
        """Map embedded tokens `[T, H]`, which are overwritten, to the normed result of the last layer, of all tokens or
        of `needed_rows`, with the adapters of `lora`.
        """

    def takes(self, lora: StepLora) -> bool:
        """Return whether `run` computes all products of a step's adapters."""


class Ops:
    """Plain torch operations. Shapes: T tokens of all requests of a step, H = hidden size."""

    name = "torch"

    def use_packages(self, dtype: torch.dtype) -> None:
        """Take operations of a model in `dtype` from installed packages where they are faster."""

    # ---- layer operations between matrix products

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    silu_and_mul = staticmethod(silu_and_mul)

    def qk_norm_rope_write(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        slot_mapping: torch.Tensor,
        num_heads: int,
    ) -> torch.Tensor:
        """Normalise every head of q and k (if weights are given), rotate them by their positions, and store k and v in
        their slots.

        qkv is `[T, (num_heads + 2 * num_kv_heads) * head_dim]` and may be overwritten; cos_sin is
        `RotaryEmbedding.cos_sin_cache`; caches are `[num_blocks, block_size, num_kv_heads, head_dim]`. Returns q `[T,
        num_heads, head_dim]`.
        """
        num_kv_heads, head_dim = k_cache.shape[2:]
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        rotated, v = heads.split([num_heads + num_kv_heads, num_kv_heads], 1)
        if q_weight is not None:
            q, k = rotated.split([num_heads, num_kv_heads], 1)
            rotated = torch.cat([rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)], 1)
        # one call for both: on a CPU, a step of few tokens takes as long as its calls
        q, k = apply_rotary(rotated, cos_sin.index_select(0, positions)).split([num_heads, num_kv_heads], 1)
        store(k_cache, slot_mapping, k)
        store(v_cache, slot_mapping, v)
        return q

    # ---- latent attention (`transformer/mla.py`); None: computed in plain torch

    # stores latents `[T, R + P]` in slots of a cache `[num_blocks, block_size, 1, R + P]` of their type, the first R
    # entries normalised, the others rotated: (latents, weight of the norm, eps, cos_sin, positions, cache, slots)
    write_latents: Callable[..., None] | None = None
    # rotates the last P entries of each head of q `[T, H, D]`, in place: (q, cos_sin, positions)
    rotate_tails: Callable[..., None] | None = None

    # ---- recurrent states (`layers/state.py`)

    causal_conv = staticmethod(causal_conv)
    gated_delta_rule = staticmethod(gated_delta_rule)
    delta_inputs = staticmethod(delta_inputs)
    gated_norm = staticmethod(gated_norm)
    sigmoid_gate = staticmethod(sigmoid_gate)
    state_norm = staticmethod(rms_norm)  # of float32 rows `[.., D]`
    l2_norm = staticmethod(l2_norm)

    @staticmethod
    def square_sums(x: torch.Tensor) -> torch.Tensor:
        """Return the sums of squares of float32 rows `[.., D]`, `[.., 1]`."""
        return x.square().sum(-1, keepdim=True)

    linear_attention = staticmethod(linear_attention)
    selective_scan = staticmethod(selective_scan)
    float_linear = staticmethod(float_linear)

    # ---- matrix products

    add_lora = staticmethod(add_lora)
    add_lora_slots = staticmethod(add_lora_slots)

    # types of inputs and weights for which `quantized_method` and `blocks_method` are asked
    quantized_types: tuple[torch.dtype, ...] = (torch.bfloat16,)
    # requirements of groups that `quantized_method` meets (`Groups.needs`); others are dequantized at load
    takes: frozenset[str] = frozenset()
    adapter_copies = 1  # bytes of an adapter of a step in the layouts of the kernels, over those in RAM

    def linear_method(self, layer: Linear) -> LinearMethod | None:
        """Return a method that replaces `PlainLinear` for the loaded floating-point weight of `layer` (for example, one
        that repacks it), or None to keep it.
        """
        return None

    def quantize_weight(self, layer: Linear, bits: int, group: int) -> LinearMethod | None:
        """Return a method that holds the bfloat16 weight of `layer` quantized to `bits` in groups of `group` columns,
        or None to use plain torch.
        """
        return None

    def quantized_method(self, layer: Linear, groups: Groups) -> LinearMethod | None:
        """Return a method that multiplies inputs of one of `quantized_types`, in the order of the weight's columns, by
        `groups`, or None to use plain torch.
        """
        return None

    # ---- experts (`layers/moe.py`)

    route = staticmethod(route)
    fused_experts = staticmethod(fused_experts)

    def packed_experts(self, experts: ListedExperts) -> Callable[..., torch.Tensor] | None:
        """Return `experts`, whose weights are loaded, as one call (x, weights, ids) -> result, or None if that is not
        supported. Its `run_adapted`, if it has one, computes all rows of a step with LoRA adapters of experts, too.
        """
        return None

    def blocks_method(self, layer: Linear, parts: list[Rows]) -> LinearMethod | None:
        """Return a method that multiplies inputs of one of `quantized_types` by blocks of a GGUF file, or None to use
        plain torch.
        """
        return None

    def argmax_prefilter(self, head: Linear) -> ArgmaxPrefilter | None:
        """Return an object that finds the argmax of the output head `head` faster than by computing all logits, or
        None.
        """
        return None

    def fused_layers(
        self, layers: Sequence[nn.Module], final_norm: Norm, tables: Sequence[torch.Tensor | None]
    ) -> FusedLayers | None:
        """Return `layers` (`DecoderLayer`s), whose weights are loaded and whose caches are bound, as one call, or
        None if that is not supported. `tables` holds `RotaryEmbedding.cos_sin_cache` of each layer, or None for a layer
        without rotary embedding.
        """
        return None

    # ---- sampling

    # `cuda.kernels.triton_sampler.sample`, or a function with its signature
    fused_sample: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    # `penalize` and `logprobs` of `cuda.kernels.triton_logits`
    fused_penalize: Callable[..., None] | None = None
    fused_logprobs: Callable[..., tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]] | None = None

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        floats: torch.Tensor,
        ints: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return one token `[S]` int64 for each row of logits `[S, V]` float32, -1 for a row in which every token is
        excluded; None to sample in plain torch.

        rows and positions are int64 `[S]`; floats `[3, N]` float64 (temperature, top_p, min_p) and ints `[2, N]` int64
        (top_k, the seed's state) are the tables of `sampling.sampler.SamplingRows`, which `rows` index.
        """
        return None

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return (token ids, values `[n, 1 + num]`, ranks `[n]`) for `sampling.logprobs.Entries`, on the host, or None
        to compute them in plain torch.
        """
        return None

    # ---- a step's inputs and outputs

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
        """Fill `tensors` from the tables `tokens` `[N, L]` and `blocks` `[G, N, M]` of G cache groups. Pad them
        (`StepTensors.pad`) where they have more requests than the step.

        `packed` int64 begins with rows, computed, scheduled, starts and samples, concatenated, with lengths `sizes`;
        max_query_len is the largest number of `scheduled`. Returns the rows, the lengths and the last tokens of the
        sampling requests, int64 `[S]` each.
        """
        rows, computed, scheduled, starts, samples = packed.split(sizes)[:5]
        num_reqs, width, padded = len(rows), tensors.block_tables.shape[2], tensors
        tensors = padded.without_padding(num_reqs)
        num_tokens = len(tensors.positions)
        # scheduled [2, 5, 3] -> req [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]; with computed [0, 4, 0] -> positions [0, 1, 4, 5,
        # 6, 7, 8, 0, 1, 2]
        req = torch.repeat_interleave(arange[:num_reqs], scheduled, output_size=num_tokens)
        torch.add((computed - starts[:-1])[req], arange[:num_tokens], out=tensors.positions)
        positions, token_rows = tensors.positions, rows[req]
        torch.index_select(tokens.view(-1), 0, token_rows * tokens.shape[1] + positions, out=tensors.input_ids)
        block_ids = blocks.flatten(1)[:, token_rows * blocks.shape[2] + positions // block_size]
        torch.add(block_ids * block_size, positions % block_size, out=tensors.slot_mappings)
        tensors.query_start_loc.copy_(starts)
        torch.add(computed, scheduled, out=tensors.seq_lens)
        tensors.block_tables.copy_(blocks[:, rows, :width])
        padded.pad(num_reqs)
        return rows[samples], tensors.seq_lens[samples].long(), (starts[1:] - 1)[samples]

    def exclude_by_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Set the logits `[S, V]` of `rows` `[R]` int64 to -inf where the token's bit is 0 in `masks` `[R, V / 32]`
        int32, the lowest bit first.
        """
        vocab_size = logits.shape[1]
        bits = torch.arange(32, device=masks.device, dtype=torch.int32)
        excluded = ((masks.unsqueeze(2) >> bits) & 1).view(len(rows), -1)[:, :vocab_size] == 0
        logits[rows] = logits[rows].masked_fill_(excluded, float("-inf"))

    def write_entries(self, table: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Do `table[indices] = values` for the table `[N]` int32; the other tensors are `[n]` int64."""
        table[indices] = values.int()

    def append_tokens(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        max_position: int,
    ) -> None:
        """Do `tokens[rows, positions] = token_ids` for the table `tokens` `[N, L]` int32. The other tensors are `[S]`
        int64; no position exceeds `max_position`.

        A negative token is stored as 0. A token at position L is dropped.
        """
        length = tokens.shape[1]
        token_ids = token_ids.clamp(min=0)
        indices = rows * length + positions
        flat = tokens.view(-1)
        if max_position >= length:
            fits = positions < length
            indices = torch.where(fits, indices, indices - 1)
            token_ids = torch.where(fits, token_ids, flat[indices])
        flat.scatter_(0, indices, token_ids.int())
