"""Run a decoder's layers on the native CPU kernels: in one call if attention and the other mixers are native too, else
in one call between each of them and the next (a segment).

The kernels and their order are the same as in the twin, the layers called one by one. A layer is any module with the
parts of `DecoderLayer` in `worker/transformer/blocks.py`. In a step that leaves states between its tokens, Python
computes the part between a mixer's projections: `mix` of `StateMixer` in `worker/transformer/mixers/base.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from ctypes import Array, addressof, byref

import torch
from torch import nn

from quire.worker.attention.base import GroupedMetadata, NativeRequests
from quire.worker.attention.scaled import LARGEST, values_of
from quire.worker.cpu.experts import NativeExperts
from quire.worker.cpu.lora import SegmentsLora
from quire.worker.cpu.native import KERNELS, CacheGroupArgs, LinearArgs, MixtureArgs, SegmentArgs
from quire.worker.cpu.ops import layer_args, qkv_args, routing_args
from quire.worker.cpu.packed_linear import NativeQuantMethod, PackedMethod
from quire.worker.cpu.state_mixers import mixer_args, state_args
from quire.worker.host import huge_pages
from quire.worker.layers.linear import Linear
from quire.worker.layers.lora import StepLora
from quire.worker.layers.norm import Norm, OffsetRMSNorm, RMSNorm, WideRMSNorm
from quire.worker.layers.rotary import Rotation
from quire.worker.layers.state import StateStep
from quire.worker.transformer.calls import LayerCall

_Groups = tuple[Array | None, int]  # `LoraRowsArgs` and their number
_NORMS = RMSNorm, WideRMSNorm, OffsetRMSNorm
_ATTENTION = "attention", "gated_attention"
_AT_ONCE = 1024  # tokens of a piece: a product takes 512 rows per pass over its weight, one pass per thread
_AT_ONCE_EXPERTS = 2048  # the more tokens, the more rows of each expert share the conversion of its weights
_PAD = 32  # elements between rows: rows at multiples of 4 KiB would map to the same few cache lines


class Segments:
    """The native form of decoder layers whose weights are packed and whose caches are bound. Create it with `of`.

    It holds addresses: create it again when weights or caches change (see `fits`).
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        parts: list[_Attention | _Mixer],
        mlps: list[_Dense | _Mixture],
        final_norm: RMSNorm,
    ):
        self.cache, self.hidden, self.parts, self.mlps = _cache(layers[0]), final_norm.weight.shape[0], parts, mlps
        # rows of projections, e. g. q, k and v; inputs of out-projections
        self.widths = tuple(max(part.widths[i] for part in parts) + _PAD for i in range(2))
        attending = [part for part in parts if isinstance(part, _Attention)]
        mixing = [part for part in parts if isinstance(part, _Mixer)]
        # None: Python mixes some
        self.head_dim = attending[0].attn.head_dim if attending and all(part.mixer for part in mixing) else None
        self.lora = SegmentsLora([_adapted(layer) for layer in layers])
        at_once = _AT_ONCE_EXPERTS if any(isinstance(mlp, _Mixture) for mlp in mlps) else _AT_ONCE
        ends = zip([None, *zip(layers, parts, mlps)], [*zip(layers, parts), None])
        self.segments = (SegmentArgs * (len(layers) + 1))(
            *(_segment(before, after, final_norm, at_once, self.widths[0]) for before, after in ends)
        )
        size = KERNELS.lib.quire_segment_workspace(self.hidden, max(mlp.inner for mlp in mlps), at_once)
        conflicts = KERNELS.lib.quire_segment_conflicts
        self.workspace = huge_pages.well_placed(
            size, dtype=torch.bfloat16, conflicts=lambda address: conflicts(address, self.hidden, at_once), enough=1.4
        )
        self.between = huge_pages.Workspace(torch.bfloat16)  # for the inputs and outputs of attention

    @classmethod
    def from_layers(
        cls, layers: Sequence[nn.Module], final_norm: Norm, tables: Sequence[torch.Tensor | None]
    ) -> Segments | None:
        """Return segments for `layers`, or None if the native code cannot compute all of them: a class did not opt in,
        layers differ in their heads, a weight is not packed, the cache is neither bfloat16 nor in 8 bits, or there are
        several ranks. `tables` is that of `Ops.fused_layers`.
        """
        if type(final_norm) not in _NORMS or not all(_opted_in(layer, type(final_norm)) for layer in layers):
            return None
        if len({_shape(layer) for layer in layers if _attends(layer)}) > 1:
            return None
        parts = [
            (_Attention if _attends(layer) else _Mixer).from_module(layer.self_attn, table)
            for layer, table in zip(layers, tables)
        ]
        mlps = [(_Mixture if layer.mlp.native_twin == "moe" else _Dense).from_module(layer.mlp) for layer in layers]
        if any(part is None for part in (*parts, *mlps)):
            return None
        return cls(layers, parts, mlps, final_norm)

    def fits(self, layer: nn.Module) -> bool:
        """Return whether the first layer, `layer`, still has the same cache."""
        return _cache(layer) is self.cache

    def run(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        wanted: torch.Tensor | None = None,
        lora: StepLora | None = None,
    ) -> torch.Tensor:
        """Run all layers on embedded tokens x `[T, H]` bfloat16, which are overwritten. Returns the normalized output
        of the last layer for all tokens or, if given, for the tokens `wanted` (int64 indices). `lora` is a step whose
        adapters this object `takes`.
        """
        assert (
            positions.dtype == attn[0].slot_mapping.dtype == torch.int64
            and x.is_contiguous()
            and (wanted is None or wanted.dtype == torch.int64)
        )
        qkv, attended = self._between(len(x))
        result = torch.empty_like(x if wanted is None else x[: len(wanted)])
        adapters, of_last = self._adapters(lora, wanted is not None)
        native = self._native_groups(attn, x.dtype)
        if native:
            groups, (_, lengths, starts, path) = native
            KERNELS.lib.quire_run_layers(
                self.segments,
                len(self.parts),
                x.data_ptr(),
                qkv.data_ptr(),
                attended.data_ptr(),
                attended.stride(0),
                result.data_ptr(),
                positions.data_ptr(),
                groups,
                len(x),
                self.workspace.data_ptr(),
                lengths.data_ptr(),
                starts.data_ptr(),
                len(lengths),
                path,
                None if wanted is None else wanted.data_ptr(),
                len(result),
                *adapters,
                *of_last,
            )
        else:
            self._run_in_turn(x, qkv, result, positions, attn, wanted, adapters, of_last)
        return result

    def _native_groups(self, attn: GroupedMetadata, dtype: torch.dtype) -> tuple[Array, NativeRequests] | None:
        """Return the cache groups of a step and the requests of all of them, or None if a part is not native."""
        if self.head_dim is None:
            return None
        groups, common = (CacheGroupArgs * len(attn))(), None
        for group, meta in zip(groups, attn):
            if isinstance(meta.extra, StateStep):
                if meta.extra.stages:
                    return None
                group.states = state_args(meta.extra)
                continue
            requests = meta.backend.native_requests(meta, self.head_dim, dtype)
            if requests is None:
                return None
            common = common or requests
            group.slots, group.block_table = meta.slot_mapping.data_ptr(), requests[0].data_ptr()
            group.ld_table = requests[0].stride(0)
        return common and (groups, common)

    def takes(self, lora: StepLora) -> bool:
        """Return whether the adapters of a step have matrices for the layers' linear layers only."""
        return self.lora.takes(lora)

    def _adapters(self, lora: StepLora | None, fewer: bool) -> tuple[_Groups, _Groups]:
        """Return the rows by adapter of all layers but the last, and of the last, which may compute `fewer`."""
        if lora is None:
            return (None, 0), (None, 0)
        of_last = lora.needed if fewer else lora.rows
        return (self.lora.args(lora, lora.rows), len(lora.rows)), (self.lora.args(lora, of_last), len(of_last))

    def _run_in_turn(
        self,
        x: torch.Tensor,
        qkv: torch.Tensor,
        result: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        wanted: torch.Tensor | None,
        adapters: _Groups,
        of_last: _Groups,
    ) -> None:
        """Run the segments one by one and call attention, or the other mixers, between them, for backends that are not
        native. Segment i writes the keys and values of layer i.
        """
        run, count, workspace = KERNELS.lib.quire_run_segment, len(x), self.workspace.data_ptr()
        slots = [part.slots(attn) for part in self.parts]
        run(
            byref(self.segments[0]),
            None,
            0,
            x.data_ptr(),
            qkv.data_ptr(),
            positions.data_ptr(),
            slots[0],
            count,
            workspace,
            0,
            *adapters,
        )
        for i, part in enumerate(self.parts, 1):
            end = i == len(self.parts)
            mixed = part.run(qkv, positions, attn, wanted if end else None).contiguous()
            if end and wanted is not None:
                x, count = x[wanted], len(wanted)
            run(
                byref(self.segments[i]),
                mixed.data_ptr(),
                mixed[0].numel(),
                x.data_ptr(),
                (result if end else qkv).data_ptr(),
                positions.data_ptr(),
                slots[0 if end else i],
                count,
                workspace,
                i,
                *(of_last if end else adapters),
            )

    def _between(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for the q, k and v and for the attention output of `num_tokens` tokens."""
        flat = self.between.take(num_tokens * sum(self.widths))
        return flat[: num_tokens * self.widths[0]].view(num_tokens, -1), flat[num_tokens * self.widths[0] :].view(
            num_tokens, -1
        )


class _Attention:
    """Attention whose norms, rotary embedding and cache are native."""

    def __init__(self, module: nn.Module, qkv: LinearArgs, out: LinearArgs, table: torch.Tensor | None):
        self.module, self.attn, self.inputs, self.out, self._table = module, module.attn, qkv, out, table
        self.widths = module.qkv_proj.out_features, out.k
        a = self.attn
        # columns of the gates, between the queries and the keys
        self.gap = out.k if module.native_twin == "gated_attention" else 0
        self._sinks = None if a.sinks is None else a.sinks.float()
        self._args = layer_args(
            a.k_cache, a.v_cache, a.num_heads, a.scale, a.sliding_window, a.soft_cap, torch.bfloat16, self._sinks
        )

    @classmethod
    def from_module(cls, module: nn.Module, table: torch.Tensor | None) -> _Attention | None:
        """Return None if a weight is not packed, the cache is neither bfloat16 nor in 8 bits, or there are several
        ranks.
        """
        qkv, out = _args(module.qkv_proj), _args(module.o_proj)
        if qkv is None or out is None or module.o_proj.group.size > 1:
            return None
        if values_of(module.attn.k_cache).dtype not in (torch.bfloat16, *LARGEST):
            return None
        return cls(module, qkv, out, table)

    def leave(self, segment: SegmentArgs) -> None:
        """Let a segment begin after this attention; `enter`: end before it."""
        segment.o_proj, segment.attention, segment.gated = self.out, addressof(self._args), self.gap > 0

    def enter(self, segment: SegmentArgs, row_stride: int) -> None:
        a = self.attn
        segment.qkv, segment.group = self.inputs, a.cache_group
        segment.cache = qkv_args(
            *self.module.head_norms(),
            self.module.eps,
            self._table,
            a.k_cache,
            a.v_cache,
            a.num_heads,
            row_stride,
            torch.bfloat16,
        )
        segment.cache.gap = self.gap

    def slots(self, attn: GroupedMetadata) -> int:
        """Return the address of the slot mapping of the step's tokens."""
        return attn[self.attn.cache_group].slot_mapping.data_ptr()

    def run(
        self, qkv: torch.Tensor, positions: torch.Tensor, attn: GroupedMetadata, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the input of `out`, for all tokens or those `wanted`, from qkv `[T, _]`, which begins with the
        queries.
        """
        heads, dim = self.attn.num_heads, self.attn.head_dim
        width = heads * dim
        attended = self.attn.attend(qkv[:, :width].view(-1, heads, dim), attn[self.attn.cache_group])
        gate = qkv[:, width : width + self.gap]
        if wanted is not None:
            attended, gate = attended[wanted], gate[wanted]
        return self.module.sigmoid_gate(attended, gate) if self.gap else attended


class _Mixer:
    """A mixer with a state."""

    def __init__(self, module: nn.Module, inputs: list[LinearArgs], out: LinearArgs, table: torch.Tensor | None):
        self.module, self._inputs, self.out, self._table = module, inputs, out, table
        self._sizes = [linear.out_features for linear in module.projections()]
        self.widths = sum(self._sizes), out.k
        self.mixer = mixer_args(module)  # None: Python computes the part between the projections

    @classmethod
    def from_module(cls, module: nn.Module, table: torch.Tensor | None) -> _Mixer | None:
        """Return None if a weight is not packed, or there are several ranks."""
        inputs, out = _chain([_args(linear) for linear in module.projections()]), _args(module.out_proj)
        return None if not inputs or out is None or module.out_proj.group.size > 1 else cls(module, inputs, out, table)

    def leave(self, segment: SegmentArgs) -> None:
        segment.o_proj = self.out
        if self.mixer is not None:
            segment.mixer = addressof(self.mixer)

    def enter(self, segment: SegmentArgs, row_stride: int) -> None:
        segment.qkv, segment.group = self._inputs[0], self.module.state.cache_group
        segment.cache.ld_qkv = row_stride

    def slots(self, attn: GroupedMetadata) -> None:
        return None

    def run(
        self, qkv: torch.Tensor, positions: torch.Tensor, attn: GroupedMetadata, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        rotation = None if self._table is None else Rotation(self._table, positions)
        projected = qkv[:, : self.widths[0]].split(self._sizes, 1)
        return self.module.mix(projected, LayerCall(rotation, attn, wanted))


def _chain(linears: list[LinearArgs | None]) -> list[LinearArgs]:
    """Return the structs of linear layers as those of one layer with consecutive columns; none if a layer is not
    packed.
    """
    parts: list[LinearArgs] = []
    for args in linears:
        if args is None:
            return []
        parts.append(LinearArgs.from_buffer_copy(args))
        while parts[-1].next:
            parts.append(LinearArgs.from_buffer_copy(LinearArgs.from_address(parts[-1].next)))
    for part, following in itertools.pairwise(parts):
        part.next = addressof(following)
    return parts


class _Dense:
    """An MLP of two linear layers."""

    def __init__(self, gate_up: LinearArgs, down: LinearArgs):
        self.gate_up, self.down, self.inner = gate_up, down, down.k

    @classmethod
    def from_module(cls, mlp: nn.Module) -> _Dense | None:
        """Return None if a weight is not packed, or the product of the gate and up does not end with the activation."""
        if not mlp.gate_up_proj.gated:
            return None
        gate_up, down = _args(mlp.gate_up_proj), _args(mlp.down_proj)
        return cls(gate_up, down) if gate_up and down else None

    def enter(self, segment: SegmentArgs) -> None:
        segment.gate_up, segment.down = self.gate_up, self.down


class _Mixture:
    """A mixture of experts."""

    inner = 0  # its products need none of the workspace

    def __init__(self, moe: nn.Module, router: LinearArgs, experts: NativeExperts):
        gate = moe.gate
        self._owners = gate.correction, gate.bias, experts
        routing = routing_args(gate.spec, gate.correction, gate.bias)
        self.args = MixtureArgs(router, routing, experts.args(gate.spec.top_k))

    @classmethod
    def from_module(cls, moe: nn.Module) -> _Mixture | None:
        """Return None if a weight is not packed, the router's form is not native, or an expert is shared by all
        tokens.
        """
        gate, experts = moe.gate, moe.experts.packed()
        router = _args(gate.linear) if isinstance(gate.linear, Linear) else None
        if (
            vars(type(gate)).get("native_twin") != "router"
            or gate.spec.bounds_groups
            or not gate.spec.has_kernels
            or router is None
            or router.next
            or not isinstance(experts, NativeExperts)
            or moe.shared_expert is not None
        ):
            return None
        return cls(moe, router, experts)

    def enter(self, segment: SegmentArgs) -> None:
        segment.mixture = addressof(self.args)


def _adapted(layer: nn.Module) -> tuple[Linear | None, ...]:
    """Return the linear layers that may have adapters."""
    mlp, mixer = layer.mlp if layer.mlp.native_twin == "mlp" else None, layer.self_attn
    of_mlp = (None, None) if mlp is None else (mlp.gate_up_proj, mlp.down_proj)
    plain = mixer.native_twin == "attention"
    return (mixer.qkv_proj, mixer.o_proj, *of_mlp) if plain else (None, None, *of_mlp)


def _attends(layer: nn.Module) -> bool:
    """Return whether the layer has attention, which may have gates."""
    return layer.self_attn.native_twin in _ATTENTION


def _cache(layer: nn.Module) -> object:
    """Return the state that a layer keeps of earlier tokens, by its identity."""
    mixer = layer.self_attn
    return mixer.state.pages if hasattr(mixer, "state") else mixer.attn.k_cache


def _opted_in(layer: nn.Module, norm: type[Norm]) -> bool:
    """Return whether the classes of a decoder layer and its parts declare that the native code computes their
    `forward`, and all norms are of the class `norm`.

    A class declares it with `native_twin` in its own body, so a subclass that overrides something does not inherit it.
    """
    if vars(type(layer)).get("native_twin") not in ("layer", "sandwich"):  # its parts may have other names
        return False
    parts = {layer.self_attn: (*_ATTENTION, "mixer"), layer.mlp: ("mlp", "moe")}
    norms = [getattr(layer, name) for name in layer.norm_names]
    return (
        all(vars(type(part)).get("native_twin") in names for part, names in parts.items())
        and all(type(one) is norm for one in norms)
        and layer.residual_scale == 1.0
        and (not _attends(layer) or _is_plain(layer.self_attn, norm))
    )


def _is_plain(attention: nn.Module, norm: type[Norm]) -> bool:
    return (
        type(attention.q_norm) in (norm, type(None))
        and attention.attn.v_head_dim == attention.attn.head_dim
        and attention.attn.chunk is None
        and attention.g_proj is None
        and attention.v_scale == 1.0
    )


def _shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the properties that must be equal in all layers, because they share buffers."""
    attention = layer.self_attn
    return (
        attention.attn.num_heads,
        attention.attn.head_dim,
        attention.qkv_proj.out_features,
    )


def _args(linear: Linear) -> LinearArgs | None:
    return linear.method.args() if isinstance(linear.method, (PackedMethod, NativeQuantMethod)) else None


def _segment(
    before: tuple[nn.Module, _Attention | _Mixer, _Dense | _Mixture] | None,
    after: tuple[nn.Module, _Attention | _Mixer] | None,
    final_norm: RMSNorm,
    at_once: int,
    row_stride: int,
) -> SegmentArgs:
    segment = SegmentArgs(at_once=at_once, hidden=final_norm.weight.shape[0], eps=final_norm.eps, wide=final_norm.wide)
    if before:
        layer, part, mlp = before
        part.leave(segment)
        mlp.enter(segment)
        if layer.native_twin == "sandwich":
            segment.o_proj_norm = layer.post_attention_layernorm.weight.data_ptr()
            segment.mlp_norm = layer.pre_feedforward_layernorm.weight.data_ptr()
            segment.down_norm = layer.post_feedforward_layernorm.weight.data_ptr()
        else:
            segment.mlp_norm = layer.post_attention_layernorm.weight.data_ptr()
    segment.norm = (after[0].input_layernorm if after else final_norm).weight.data_ptr()
    if after:
        after[1].enter(segment, row_stride)
    return segment
