"""The numbers of tokens for which steps with prompts are recorded in pieces (`mixed_graphs.py`)."""

from __future__ import annotations

from bisect import bisect_right

from quire.worker.spec.model import LayerSpec, ModelSpec

# in tokens: below 128 a step takes the same time; above, padding costs at most a third of it
_SMALL = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
_LARGEST = 16384
# An eager step takes the host some 0.7 ms per layer, beside an H200 with 4e14 operations per second. Recordings end at
# three times the tokens for which the device takes as long, because other hosts are slower.
_HOST_SECONDS, _OPERATIONS, _MARGIN = 0.7e-3, 4e14, 3


def piece_sizes(spec: ModelSpec, max_num_tokens: int, tp: int = 1) -> list[int]:
    """Return the sizes to record, ascending, of which the last may be the step's budget, `max_num_tokens`. Above 1,024
    tokens padding is at most an eighth of a step.
    """
    most = min(max_num_tokens, max(_SMALL[-1], _host_bound(spec, tp)))
    sizes, size = list(_SMALL), _SMALL[-1]
    while size < _LARGEST:
        size += 1 << (size.bit_length() - 4)  # an eighth of the power of two below
        sizes.append(size)
    sizes = sizes[: bisect_right(sizes, most)]
    return sizes if most < max_num_tokens or most in sizes else [*sizes, most]


def _host_bound(spec: ModelSpec, tp: int) -> int:
    """Return the number of tokens up to which the host may be slower than the device."""
    operations = 2 * sum(_products(layer, spec.hidden_size) for layer in spec.layers) / tp
    return int(_MARGIN * len(spec.layers) * _HOST_SECONDS * _OPERATIONS / operations)


def _products(layer: LayerSpec, hidden: int) -> int:
    """Return about how many products of a weight a token needs in a layer."""
    mixer = 6 * hidden if layer.state else 0
    if layer.attends:
        mixer += (layer.num_heads + layer.num_kv_heads) * (layer.head_dim + layer.v_head_dim)
    moe = layer.moe
    inner = layer.intermediate_size if moe is None else moe.routing.top_k * moe.intermediate_size + moe.shared_size
    return hidden * (mixer + 3 * inner)
