"""Rotary embeddings as config.json describes them. Torch-free; `layers/rotary.py` computes the tables.

Reads both generations of files: `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers
5), whose values may differ by attention kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
_ALIASES = {"su": "longrope", "mrope": "default"}
# keys that must be positive numbers
_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "dynamic": ("factor",),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One set of rotary embeddings: `rotary_dim` of the `head_dim` entries of a head are rotated."""

    theta: float
    head_dim: int
    rotary_dim: int
    scaling: dict[str, Any] | None = None  # None: unscaled; else `rope_type` and all its numbers
    interleaved: bool = False  # the checkpoint rotates entries 2i and 2i + 1; else i and i + rotary_dim / 2
    max_position_embeddings: int = 0
    axes: tuple[int, ...] = ()  # for positions with three axes (`layers/rotary.py`): the axis of each rotated pair

    def context_length(self) -> int:
        """Return the longest context in tokens.

        Scaling that stretches positions also stretches the context, unless `max_position_embeddings` already includes
        it (llama3, longrope, dynamic with `alpha`).
        """
        scaling, positions = self.scaling or {}, self.max_position_embeddings
        match scaling.get("rope_type"):
            case "linear":
                return int(positions * scaling["factor"])
            case "yarn":
                return max(positions, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
            case "dynamic" if not scaling.get("alpha"):
                return int(positions * scaling["factor"])
        return positions


def read_ropes(values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
    """Return the sets of rotary embeddings: one named "default", or one per attention kind.

    `values` holds the family's `rope_theta`, `partial_rotary_factor`, `head_dim` and `max_position_embeddings`. Raises
    ValueError naming the key.
    """
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    nested = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
    if nested:
        return {kind: read_rope(dict(value), values, raw) for kind, value in nested.items()}
    return {"default": read_rope(rope, values, raw)}


def read_ropes_by_kind(values: dict[str, Any], raw: dict[str, Any], local_theta: float) -> dict[str, RopeSpec]:
    """Read ropes as `read_ropes` does, for families whose windowed layers have embeddings of their own: scaling that
    config.json does not give by kind is that of the layers with full attention.
    """
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if not any(isinstance(value, dict) for value in rope.values()):
        rope = {"full_attention": rope}
    local = values | {"rope_theta": local_theta}
    return {
        "full_attention": read_rope(dict(rope.get("full_attention") or {}), values, raw),
        "sliding_attention": read_rope(dict(rope.get("sliding_attention") or {}), local, raw),
    }


def read_rope(rope: dict[str, Any], values: dict[str, Any], raw: dict[str, Any]) -> RopeSpec:
    """Return one set of rotary embeddings. `rope` holds its keys of config.json."""
    rope_type = rope.pop("type", None)
    rope_type = rope.pop("rope_type", rope_type) or "default"
    rope_type = _ALIASES.get(rope_type, rope_type)
    theta = rope.pop("rope_theta", None) or values["rope_theta"]
    if not isinstance(theta, int | float) or theta <= 0:
        raise ValueError(f"rope_theta must be a positive number, not {theta!r}")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    head_dim, factor = values["head_dim"], rope.get("partial_rotary_factor") or values["partial_rotary_factor"]
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ValueError(f"partial_rotary_factor must be a number above 0 and up to 1, not {factor!r}")
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * factor)
    if rotary_dim % 2 or head_dim % 2:
        raise ValueError(
            f"head_dim {head_dim} must be even for rotary embeddings, and so must head_dim * partial_rotary_factor "
            f"{factor}"
        )
    positions = values["max_position_embeddings"]
    scaling = None if rope_type == "default" else _scaling(rope_type, rope, raw, positions, factor)
    return RopeSpec(float(theta), head_dim, rotary_dim, scaling, values["rope_interleaved"], positions)


def _scaling(
    rope_type: str, rope: dict[str, Any], raw: dict[str, Any], positions: int, factor: float
) -> dict[str, Any]:
    """Return the numbers of a scaled embedding, with the defaults of their type."""
    if rope_type in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = (
            raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or positions
        )
    if rope_type in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = positions / rope["original_max_position_embeddings"]
    if rope_type == "dynamic":
        rope["original_max_position_embeddings"] = positions
        rope.setdefault("factor", 1.0 if rope.get("alpha") else None)
    if rope_type == "proportional":
        rope["partial_rotary_factor"] = factor
    for key in _NUMBERS.get(rope_type, ()):
        if not isinstance(rope.get(key), int | float) or rope[key] <= 0:
            raise ValueError(f"rope_type {rope_type!r} needs a positive number {key!r}, not {rope.get(key)!r}")
    for key in ("short_factor", "long_factor") if rope_type == "longrope" else ():
        if not isinstance(rope.get(key), list):
            raise ValueError(f"rope_type 'longrope' needs a list of numbers {key!r}, not {rope.get(key)!r}")
    return {"rope_type": rope_type, **rope}
