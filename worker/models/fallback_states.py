"""Models of transformers whose layers keep a recurrent state or the last inputs of a convolution.

transformers' own cache classes hold the states of one request during a pass; between passes they are in quire's pages
(`layers/state.py`), so that prefix hits, checkpoints and preemption are those of other hybrids. Each request is
computed by itself, and what follows its first tokens one token at a time, because not every model continues from a
state with several: correct, and slow. Keys and values go to quire's attention, as in other models (`fallback.py`).
"""

from __future__ import annotations

import importlib
import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from quire.worker.attention.base import AttentionMetadata, GroupedMetadata
from quire.worker.layers.state import RecurrentState, StateStep
from quire.worker.spec.state import WholeSpec

# families whose cache class is their own: its module and name, and its list of the layers' states
_OWN_CACHES = {"minimax": ("transformers.models.minimax.modeling_minimax", "MiniMaxCache", "linear_cache")}
_LISTS = {states for _, _, states in _OWN_CACHES.values()}
_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_KNOWN = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}


@dataclass(frozen=True, slots=True)
class Held:
    """One state of a layer: the attribute of its cache layer, or of the cache, the index there, and what the first pass
    made of it.
    """

    attribute: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    has_previous: bool


def make_cache(config: Any, count: int = 0, updated: list[int] | None = None) -> transformers.DynamicCache:
    """Return an empty cache of one request with `count` computed tokens, whose attention layers keep nothing. They add
    their index to `updated` before they attend.
    """
    seen = [] if updated is None else updated

    def update(k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(layer)
        return k, v

    if own := _OWN_CACHES.get(config.model_type):
        cache = getattr(importlib.import_module(own[0]), own[1])()
    else:
        cache = transformers.DynamicCache(config=config)
    cache.update = update
    for part in (cache, *cache.layers):
        part.get_seq_length = lambda *_, **__: count
    return cache


def keeps_states(config: Any) -> bool:
    """Return whether layers keep a state in transformers' cache classes. Raises ValueError if they need others."""
    try:
        layers = transformers.DynamicCache(config=config).layers
    except KeyError as error:
        raise ValueError(f"transformers has no cache for layers of type {error}") from error
    found = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    if found and (others := {type(layer).__name__ for layer in layers if type(layer) not in _KNOWN} - {"DummyLayer"}):
        raise ValueError(f"its cache has layers that are not implemented: {', '.join(sorted(others))}")
    return found


def pass_tokens(base: nn.Module, cache: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the hidden states `[n, H]` of tokens ids `[n]`, after which the cache holds their states."""
    names = inspect.signature(base.forward).parameters
    name = next((name for name in _ARGUMENTS if name in names), None)
    if name is None:
        raise ValueError("it keeps its state elsewhere than in transformers' cache classes")
    options = {name: cache, "use_cache": True} | ({"position_ids": positions[None]} if "position_ids" in names else {})
    return base(input_ids=ids[None].long(), **options).last_hidden_state[0]


def held_states(cache: transformers.DynamicCache, num_layers: int) -> list[tuple[Held, ...]]:
    """Return what each of `num_layers` layers of a cache holds after a first pass."""
    for attribute in _LISTS:
        if (states := getattr(cache, attribute, None)) is not None:
            states = [*states, *[[]] * (num_layers - len(states))]
            return [
                (Held(attribute, i, tuple(state.shape[1:]), state.dtype, True),) if torch.is_tensor(state) else ()
                for i, state in enumerate(states)
            ]
    return [tuple(_held(layer)) for layer in cache.layers]


def _held(layer: Any) -> Iterator[Held]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return
    for attribute in ("conv_states", "recurrent_states"):
        for index, state in getattr(layer, attribute).items():
            if state is not None:
                previous = bool(layer.has_previous_state[index])
                yield Held(attribute, index, tuple(state.shape[1:]), state.dtype, previous)


def _get(cache: Any, layer: int, state: Held) -> torch.Tensor:
    """Return a state of a layer."""
    owner = cache if state.attribute in _LISTS else cache.layers[layer]
    return getattr(owner, state.attribute)[state.index]


def _put(cache: Any, layer: int, state: Held, value: torch.Tensor) -> None:
    """Let a layer continue from a state."""
    if state.attribute in _LISTS:
        states = getattr(cache, state.attribute)
        states.extend([] for _ in range(state.index + 1 - len(states)))
        states[state.index] = value
        return
    of_layer = cache.layers[layer]
    getattr(of_layer, state.attribute)[state.index] = value
    getattr(of_layer, f"is_{state.attribute}_initialized")[state.index] = True
    of_layer.has_previous_state[state.index] = state.has_previous
    of_layer.dtype, of_layer.device = value.dtype, value.device
    if state.attribute == "conv_states":
        of_layer.conv_kernel_size[state.index] = value.shape[-1]


def state_spec(held: tuple[Held, ...]) -> WholeSpec | None:
    """Return the spec of a layer's states, None without any."""
    return WholeSpec(tuple(state.shape for state in held)) if held else None


class StatePasses:
    """Computes steps of a model with states."""

    def __init__(self, config: Any, held: list[tuple[Held, ...]]):
        self.config, self.held = config, held
        self.pages = nn.ModuleDict(
            {str(i): RecurrentState(i, tuple(state.shape for state in layer)) for i, layer in enumerate(held) if layer}
        )

    def run(
        self,
        base: nn.Module,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        attending_to: Callable[[GroupedMetadata], Any],
    ) -> torch.Tensor:
        """Map the step's tokens `[T]` to hidden states `[T, H]`. `attending_to` is the context in which the model's
        attention uses the metadata of one request's tokens.
        """
        first = next(iter(self.pages.values()))
        whole, group = first.step(attn), attn[first.cache_group]
        begins, lengths = group.host_lengths()
        out: torch.Tensor | None = None
        every = torch.arange(len(input_ids))
        for index, part in whole.stages or [(slice(None), whole)]:
            starts, tokens = part.starts.tolist(), every[index].tolist()
            for i in range(len(starts) - 1):
                if starts[i] == starts[i + 1]:
                    continue
                start, stop = tokens[starts[i]], tokens[starts[i + 1] - 1] + 1
                row = bisect_right(begins, start) - 1
                computed = lengths[row] - (begins[row + 1] - start)
                hidden = []
                cache = self._load(part, i, computed)
                for at in _pieces(start, stop, bool(part.fresh[i])):
                    self._count(cache, computed + at.start - start)
                    metas = _request_metadata(attn, row, at, computed + at.stop - start)
                    with attending_to(metas):
                        hidden.append(pass_tokens(base, cache, input_ids[at], positions[at]))
                self._store(part, i, cache)
                result = torch.cat(hidden)
                out = result.new_empty(len(input_ids), result.shape[1]) if out is None else out
                out[start:stop] = result
        assert out is not None
        return out

    @staticmethod
    def _count(cache: Any, count: int) -> None:
        """Let the cache tell how many tokens are computed."""
        for part in (cache, *cache.layers):
            part.get_seq_length = lambda *_, **__: count

    def _load(self, step: StateStep, i: int, computed: int) -> Any:
        """Return a cache with the states that request `i` reads."""
        cache = make_cache(self.config, computed)
        if bool(step.fresh[i]):
            return cache
        for number, held in enumerate(self.held):
            for state, pages in zip(held, self.pages[str(number)].pages if held else ()):
                # a copy, which the pass overwrites
                _put(cache, number, state, pages[step.read[i]][None].to(state.dtype, copy=True))
        return cache

    def _store(self, step: StateStep, i: int, cache: Any) -> None:
        """Write the states to the page of request `i`."""
        for number, held in enumerate(self.held):
            for state, pages in zip(held, self.pages[str(number)].pages if held else ()):
                pages[step.write[i]] = _get(cache, number, state)[0].float()


def _pieces(start: int, stop: int, fresh: bool) -> list[slice]:
    """Return the tokens of one pass each: the first ones of a request together, later ones alone."""
    return [slice(start, stop)] if fresh else [slice(at, at + 1) for at in range(start, stop)]


def _request_metadata(attn: GroupedMetadata, row: int, tokens: slice, length: int) -> tuple[AttentionMetadata, ...]:
    """Return the metadata of some tokens of the request at `row`, which has `length` tokens then; a state group keeps
    its.
    """
    made = []
    for meta in attn:
        if isinstance(meta.extra, StateStep):
            made.append(meta)
            continue
        count, device = tokens.stop - tokens.start, meta.block_table.device
        one = replace(
            meta,
            slot_mapping=meta.slot_mapping[tokens],
            query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([length], dtype=meta.seq_lens.dtype, device=device),
            block_table=meta.block_table[row : row + 1],
            max_query_len=count,
            max_seq_len=length,
            extra=None,
            host=None,
            latent_parts=None,
        )
        one.backend.build(one)
        made.append(one)
    return tuple(made)
