"""Load the compiled CPU kernels, or start a background build if they are not compiled yet.

The torch twins serve until the library is loaded, so a start does not wait for the compiler. The worker calls `load()`
once at start. While `building` is true, it calls `poll()` between steps; when that returns True, it finalizes the
model's layers again.
"""

from __future__ import annotations

import ctypes
import logging
import time
from ctypes import c_float, c_int, c_long, c_void_p

import torch

from quire.worker.cpu import build
from quire.worker.cpu.background_build import BackgroundBuild

logger = logging.getLogger(__name__)

SLOWER = "3 to 20 times slower"  # than the kernels, by model and batch
_P, _L, _I, _F = c_void_p, c_long, c_int, c_float


class ScalesArgs(ctypes.Structure):
    """The scales of a cache in 8 bits. Mirrors `Scales` in eight_bits.h; all zero if absent."""

    _fields_ = [("base", _P), ("block", _L), ("slot", _L), ("head", _L)]


class LayerArgs(ctypes.Structure):
    """The arguments of attention that are constant per layer. Mirrors `Layer` in attention.h; strides in elements."""

    _fields_ = [
        ("k_cache", _P),
        ("v_cache", _P),
        ("k_block", _L),
        ("k_slot", _L),
        ("k_head", _L),
        ("v_block", _L),
        ("v_slot", _L),
        ("v_head", _L),
        ("num_heads", _L),
        ("num_kv_heads", _L),
        ("head_dim", _L),
        ("v_dim", _L),
        ("block_size", _L),
        ("dtype", _L),
        ("window", _L),
        ("scale", _F),
        ("soft_cap", _F),
        ("cache", _L),
        ("k_scales", ScalesArgs),
        ("v_scales", ScalesArgs),
        ("sinks", _P),
        ("rope_scales", ScalesArgs),
    ]


class QkvArgs(ctypes.Structure):
    """The arguments of q/k norm, rotary embedding and cache write. Mirrors `QkvArgs` in kernels.h."""

    _fields_ = [
        ("qkv", _P),
        ("k_cache", _P),
        ("v_cache", _P),
        ("q_weight", _P),
        ("k_weight", _P),
        ("cos_sin", _P),
        ("ld_qkv", _L),
        ("k_block", _L),
        ("k_slot", _L),
        ("k_head", _L),
        ("v_block", _L),
        ("v_slot", _L),
        ("v_head", _L),
        ("num_heads", _L),
        ("num_kv_heads", _L),
        ("head_dim", _L),
        ("v_dim", _L),
        ("rotary_dim", _L),
        ("block_size", _L),
        ("dtype", _L),
        ("wide", _L),
        ("eps", _F),
        ("cache", _L),
        ("k_scales", ScalesArgs),
        ("v_scales", ScalesArgs),
        ("gap", _L),
    ]


class QuantArgs(ctypes.Structure):
    """A packed weight of 4 to 8 bits. Mirrors `Quant` in quant.h."""

    _fields_ = [
        ("data", _P),
        ("scales", _P),
        ("offsets", _P),
        ("kind", _I),
        ("group", _I),
        ("groups", _I),
        ("k_steps", _I),
        ("half", _I),
        ("narrow", _I),
    ]


class CompactArgs(ctypes.Structure):
    """A packed bf16 weight in 12 bits. Mirrors `Compact` in compact.h."""

    _fields_ = [("data", _P), ("exceptions", _P), ("first", _P), ("scales", _P), ("k_steps", _I), ("units", _P)]


class ScreenArgs(ctypes.Structure):
    """A copy of a weight `[n, k]` in 8 bits, and statistics of each of its rows.

    Mirrors `Screen` in greedy.h, which documents both shapes.
    """

    _fields_ = [("data", _P), ("columns", _P), ("k_steps", _L)]


class LinearArgs(ctypes.Structure):
    """A packed linear layer. Mirrors `Linear` in kernels.h; all zero if absent."""

    _fields_ = [
        ("packed", _P),
        ("quant", _P),
        ("compact", _P),
        ("bias", _P),
        ("n", _L),
        ("k", _L),
        ("gated", _L),
        ("path", _L),
        ("next", _P),
    ]


class ExpertsArgs(ctypes.Structure):
    """The experts of a layer that are on this rank. Mirrors `Experts` in kernels.h."""

    _fields_ = [
        ("gate_up", ctypes.POINTER(LinearArgs)),
        ("down", ctypes.POINTER(LinearArgs)),
        ("first", _L),
        ("count", _L),
        ("top_k", _L),
        ("weigh_inputs", _L),
        ("squares", _L),
    ]


class RoutingArgs(ctypes.Structure):
    """The choice of experts. Mirrors `Routing` in kernels.h."""

    _fields_ = [
        ("bias", _P),
        ("correction", _P),
        ("num_experts", _L),
        ("top_k", _L),
        ("scores", _L),
        ("weights", _L),
        ("scale", _F),
        ("epsilon", _F),
    ]


class MixtureArgs(ctypes.Structure):
    """A mixture of experts. Mirrors `Mixture` in segment.cpp."""

    _fields_ = [
        ("router", LinearArgs),
        ("routing", RoutingArgs),
        ("experts", ExpertsArgs),
    ]


class LoraPartArgs(ctypes.Structure):
    """Rows of a layer that are rows of one module of an adapter. Mirrors `LoraPart` in lora.h."""

    _fields_ = [("b", _P), ("first", _L), ("rank", _L), ("columns", _L), ("at", _L), ("step", _L)]


class LoraMatricesArgs(ctypes.Structure):
    """An adapter's matrices for one layer. Mirrors `LoraMatrices` in lora.h; all zero if absent."""

    _fields_ = [("a", _P), ("rank", _L), ("k", _L), ("parts", _P), ("num_parts", _L), ("tiles", _P)]


class LoraColumnsArgs(ctypes.Structure):
    """Adapters' terms of 16 columns of a product. Mirrors `LoraColumns` in lora_tiles.h."""

    _fields_ = [("b", _P), ("inner", _L), ("wide", _L), ("narrow", _L)]


class LoraTilesArgs(ctypes.Structure):
    """A layer's matrices for products on AMX. Mirrors `LoraTiles` in lora_tiles.h."""

    _fields_ = [("a", _P), ("columns", _P), ("num_columns", _L), ("width", _L)]


class LoraRowsArgs(ctypes.Structure):
    """The rows of a step that use one adapter. Mirrors `LoraRows` in lora.h."""

    _fields_ = [("rows", _P), ("scales", _P), ("count", _L), ("layers", _P)]


class SegmentArgs(ctypes.Structure):
    """The operations between the attention of one layer and that of the next. Mirrors `Segment` in segment.cpp."""

    _fields_ = [
        ("o_proj", LinearArgs),
        ("gate_up", LinearArgs),
        ("down", LinearArgs),
        ("qkv", LinearArgs),
        ("mlp_norm", _P),
        ("norm", _P),
        ("o_proj_norm", _P),
        ("down_norm", _P),
        ("cache", QkvArgs),
        ("attention", _P),
        ("group", _L),
        ("mixture", _P),
        ("mixer", _P),
        ("gated", _L),
        ("at_once", _L),
        ("hidden", _L),
        ("wide", _L),
        ("eps", _F),
    ]


class StateMixerArgs(ctypes.Structure):
    """What is between the projections of a mixer with a state. Mirrors `StateMixer` in mixers.h."""

    _fields_ = [
        ("kind", _L),
        ("conv", _P),
        ("conv_bias", _P),
        ("conv_pages", _P),
        ("channels", _L),
        ("width", _L),
        ("state_pages", _P),
        ("a_log", _P),
        ("dt_bias", _P),
        ("norm", _P),
        ("heads", _L),
        ("k_heads", _L),
        ("dk", _L),
        ("dv", _L),
        ("gates", _L),
        ("tiled", _L),
        ("query_length", _F),
        ("strength", _F),
        ("eps", _F),
    ]


class StateStepArgs(ctypes.Structure):
    """The pages and tokens of a step's requests. Mirrors `StateStep` in mixers.h; all zero if absent."""

    _fields_ = [("read", _P), ("write", _P), ("fresh", _P), ("starts", _P), ("num_requests", _L)]


class CacheGroupArgs(ctypes.Structure):
    """The slots and block tables, or the states, of a step in one cache group. Mirrors `CacheGroup` in segment.cpp."""

    _fields_ = [("slots", _P), ("block_table", _P), ("ld_table", _L), ("states", StateStepArgs)]


_SIGNATURES = {
    "quire_set_threads": ([_I], None),
    "quire_gemm_packed_columns": ([_L, _I], _L),
    "quire_gemm_pack": ([_P, _L, _P, _L, _L, _I], None),
    "quire_gemm_unpack_rows": ([_P, _P, _L, _P, _L, _L], None),
    "quire_gemm_run": ([_P, _L, _P, _P, _P, _L, _L, _L, _L, _I, _I], None),
    "quire_gemm_compact": ([_P, _L, _P, _P, _P, _P, _P, _L, _L, _I, _L], _L),
    "quire_compact_rows": ([ctypes.POINTER(CompactArgs), _P, _L, _P, _L, _L], None),
    "quire_gemm_run_compact": ([_P, _L, ctypes.POINTER(CompactArgs), _P, _P, _L, _L, _L, _L, _I, _I], None),
    "quire_gemm_run_quant": ([_P, _L, ctypes.POINTER(QuantArgs), _P, _P, _L, _L, _L, _L, _I, _I], None),
    "quire_quantize": ([_P, _L, _P, _P, _L, _L, _I, _L, _I], None),
    "quire_pack_quantized": ([_P, _P, _P, ctypes.POINTER(QuantArgs), _L, _L, _I], None),
    "quire_pack_blocks": ([_P, _P, _L, _I, ctypes.POINTER(QuantArgs), _L, _L, _I], None),
    "quire_quant_rows": ([ctypes.POINTER(QuantArgs), _P, _L, _P, _L, _L], None),
    "quire_screen_make": ([_P, _P, ctypes.POINTER(ScreenArgs), _L, _L], ctypes.c_bool),
    "quire_screen_measure": ([_P, ctypes.POINTER(ScreenArgs), _L], ctypes.c_bool),
    "quire_greedy": ([_P, _L, _P, _P, _P, ctypes.POINTER(ScreenArgs), _P, _L, _L, _L], _L),
    "quire_add_rms_norm": ([_P, _L, _P, _L, _P, _P, _L, _L, _L, _F, _I, _I], None),
    "quire_silu_and_mul": ([_P, _L, _P, _L, _L, _L, _I], None),
    "quire_qkv_to_cache": ([ctypes.POINTER(QkvArgs), _P, _P, _P, _L], None),
    "quire_write_kv": ([ctypes.POINTER(QkvArgs), _P, _L, _P, _L, _P, _L], None),
    "quire_fill_inputs": ([_P, _L, _L, _P, _L, _P, _L, _L, _P, _P, _P, _P, _P, _P, _L, _L, _P], None),
    "quire_exclude_by_bitmask": ([_P, _L, _L, _P, _P, _L, _L], None),
    "quire_append_tokens": ([_P, _L, _P, _P, _P, _L], None),
    "quire_sample": ([_P, _L, _L, _L, _P, _P, _P, _P, _L, _P], None),
    "quire_causal_conv": (
        [_P, _L, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, ctypes.c_bool, _P, ctypes.c_bool],
        None,
    ),
    "quire_delta_inputs": ([_P, _L, _P, _P, _P, _L, _L, _L, _L, _L, _F, _F, _P, _P, _P, _P], None),
    "quire_gated_norm": ([_P, _P, _L, _P, _P, _L, _L, _L, _F, _I], None),
    "quire_sigmoid_gate": ([_P, _L, _P, _L, _L, _L], None),
    "quire_mix": ([ctypes.POINTER(StateMixerArgs), ctypes.POINTER(StateStepArgs), _P, _L, _P, _L], None),
    "quire_delta_rule": (
        [_P, _P, _P, _L, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _P],
        None,
    ),
    "quire_linear_attention": ([_P, _L, _P, _L, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _P], None),
    "quire_selective_scan": ([_P, _P, _P, _P, _L, _P, _L, _P, _P, _P, _P, _P, _L, _L, _L, _P], None),
    "quire_float_linear": ([_P, _L, _P, _P, _L, _L, _L, _P], None),
    "quire_logprobs": ([_P, _L, _L, _L, _P, _L, _I, _P, _P, _P], None),
    "quire_segment_workspace": ([_L, _L, _L], _L),
    "quire_segment_conflicts": ([_P, _L, _L], ctypes.c_double),
    "quire_add_lora": ([_P, _L, _P, _L, _P, _L, _L, _I, _I, ctypes.c_bool], None),
    "quire_lora_tiles_elements": ([_L, _L], _L),
    "quire_lora_tiles_pack": (
        [ctypes.POINTER(LoraMatricesArgs), _P, ctypes.POINTER(LoraTilesArgs), _P, _P, _L],
        ctypes.c_bool,
    ),
    "quire_run_adapted": ([ctypes.POINTER(LinearArgs), _P, _L, _P, _L, _L, _P, _L], None),
    "quire_run_segment": ([ctypes.POINTER(SegmentArgs), _P, _L, _P, _P, _P, _P, _L, _P, _L, _P, _L], None),
    "quire_run_layers": (
        [
            ctypes.POINTER(SegmentArgs),
            _L,
            _P,
            _P,
            _P,
            _L,
            _P,
            _P,
            ctypes.POINTER(CacheGroupArgs),
            _L,
            _P,
            _P,
            _P,
            _L,
            _I,
            _P,
            _L,
            _P,
            _L,
            _P,
            _L,
        ],
        None,
    ),
    "quire_route": ([ctypes.POINTER(RoutingArgs), _P, _P, _P, _L], None),
    "quire_run_experts": ([ctypes.POINTER(ExpertsArgs), _P, _L, _P, _P, _P, _L, _L], None),
    "quire_run_adapted_experts": ([ctypes.POINTER(ExpertsArgs), _P, _L, _P, _P, _P, _L, _L, _P, _P, _L], None),
    "quire_paged_attention": ([ctypes.POINTER(LayerArgs), _P, _L, _P, _L, _P, _L, _P, _P, _L, _I, _P, _L], None),
}


class Kernels:
    """The native library of this process.

    `lib` is None until it is loaded.
    """

    def __init__(self) -> None:
        self.lib: ctypes.CDLL | None = None
        self.level: str | None = None
        self.level_reason = "not loaded"
        self.activation_bits: int | None = None  # of products with quantized weights: 8, 16; None: by kind of weight
        self.warning = ""  # why there will never be any, and the remedy
        self.loaded_at: float | None = None  # time.time()
        self.left_to_serve = False  # a preview: `quire serve` would build them
        self._status = "not loaded"
        self._build: BackgroundBuild | None = None

    @property
    def status(self) -> str:
        """Return the state of the library, for the log and the table of choices."""
        return self._status if self._build is None else self._build.status

    def load(self, background: bool = True, level: str = "auto", preview: bool = False) -> bool:
        """Load the library of `level` if it exists, else start a build in a separate process (background=False: build
        in this one; preview: none). Returns True if the library is loaded.

        Raises:
            ValueError: this CPU does not support the level.
            BuildError: background=False, and the build failed.
        """
        if self.lib is not None and level in ("auto", self.level):
            return True
        self.level, self.level_reason = build.choose_level(level)
        if self.level is None:
            self._status = f"no native kernels: {build.NO_LEVEL}"
            self.warning = f"{self._status}; plain torch serves, {SLOWER}"
            return False
        path = build.find_library(self.level)
        if path is not None:
            return self._open(str(path))
        if build.compiler() is None:
            self._status = "no native kernels: no C++ compiler to build them ($CXX, g++, clang++) and none prebuilt"
            self.warning = (
                f"{self._status}; plain torch serves, {SLOWER}: install g++ (or clang++) and start again, or install "
                "quire from a wheel that holds the kernels"
            )
            return False
        if preview:
            self.left_to_serve = True
            self._status = f"native kernels ({self.level}) are not built yet: quire serve does it at its start"
            return False
        if not background:
            return self._open(str(build.build(self.level, build.cache_folder())))
        # Also build the narrower levels, so that the next start can choose between them.
        rivals = build.rivals(self.level) if level == "auto" else []
        self._build = BackgroundBuild(self.level, rivals)
        return False

    def serve(self, device: torch.device) -> bool:
        """Return whether the library is loaded and `device` is the CPU."""
        return self.lib is not None and device.type == "cpu"

    @property
    def building(self) -> bool:
        """Return whether a background build is running or its end has not been polled yet."""
        return self._build is not None

    def give_up(self, reason: str) -> None:
        """Use no native kernels in this process, and report `reason` in `status`. A running build continues, for the
        next start.
        """
        self.lib, self._build, self._status = None, None, f"no native kernels: {reason}"

    def poll(self) -> bool:
        """Load the library if the background build has succeeded. Returns True exactly once, when it is loaded."""
        if self._build is None:
            return False
        try:
            path = self._build.poll()
        except build.BuildError as error:
            self._build, self._status = None, "no native kernels: the build failed"
            logger.warning("building the native kernels failed; plain torch serves, %s:\n%s", SLOWER, error)
            return False
        if path is None:
            return False
        self._build = None
        return self._open(str(path))

    def _open(self, path: str) -> bool:
        try:
            lib = ctypes.CDLL(path)
        except OSError as error:
            self._status = f"no native kernels: {error}"
            logger.warning("cannot load the native kernels: %s", error)
            return False
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.argtypes, function.restype = arguments, result
        lib.quire_set_threads(torch.get_num_threads())
        self.lib, self._status, self.loaded_at = lib, f"native kernels ({self.level})", time.time()
        return True


KERNELS = Kernels()  # one per process, because a library cannot be unloaded
