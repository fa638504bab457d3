"""The C structs of mixers with a state, which a segment computes between their projections."""

from __future__ import annotations

from torch import nn

from quire.worker.cpu import states
from quire.worker.cpu.native import StateMixerArgs, StateStepArgs
from quire.worker.layers.state import StateStep
from quire.worker.transformer.mixers.delta import GatedDeltaNet
from quire.worker.transformer.mixers.short_conv import ShortConv

_SHORT_CONV, _DELTA = 0, 1  # `StateMixer::Kind` in csrc/mixers.h


def mixer_args(module: nn.Module) -> StateMixerArgs | None:
    """Return the C struct of a mixer whose pages are bound, or None if Python must compute it.

    It holds addresses only: the caller keeps the module and its pages alive.
    """
    if states.reason(module.state.shapes) is not None:
        return None
    if isinstance(module, ShortConv):
        return _short_conv_args(module)
    return _delta_args(module) if isinstance(module, GatedDeltaNet) and module.spec.gate == "silu" else None


def state_args(step: StateStep) -> StateStepArgs:
    """Return the C struct of a step without stages; it holds addresses only."""
    assert not step.stages
    return StateStepArgs(*states.step_args(step))


def _short_conv_args(module: ShortConv) -> StateMixerArgs:
    args, conv = StateMixerArgs(kind=_SHORT_CONV), module.conv
    args.conv, args.conv_bias = conv.weight.data_ptr(), None if conv.bias is None else conv.bias.data_ptr()
    args.width, args.channels = conv.weight.shape
    args.conv_pages = states.address(module.state.pages[0])
    return args


def _delta_args(module: GatedDeltaNet) -> StateMixerArgs:
    args, conv, heads = StateMixerArgs(kind=_DELTA), module.conv1d, module.heads
    args.conv = conv.weight.data_ptr()
    args.width, args.channels = conv.weight.shape
    args.conv_pages, args.state_pages = map(states.address, module.state.pages[:2])
    args.a_log, args.dt_bias, args.norm = (t.data_ptr() for t in (module.A_log, module.dt_bias, module.norm))
    args.heads, args.k_heads, args.dk, args.dv = heads.num_v, heads.num_k, heads.k_dim, module.spec.v_dim
    args.gates, args.tiled = module.in_proj.out_features, heads.tiled
    args.query_length, args.strength, args.eps = heads.k_dim**-0.5, heads.strength, module.eps
    return args
