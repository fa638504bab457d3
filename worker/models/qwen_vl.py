"""The language models of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 with images and PaddleOCR-VL, whose rotary embedding
has three axes, so that tokens of images turn by time, row and column (https://arxiv.org/abs/2409.12191, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from quire.worker.models.ernie4_5 import Ernie4_5
from quire.worker.models.qwen2 import Qwen2
from quire.worker.models.qwen3 import Qwen3
from quire.worker.models.qwen3_next import Qwen35, Qwen35Moe
from quire.worker.models.qwen_moe import Qwen3Moe
from quire.worker.spec.rope import RopeSpec


class AxialRope:
    """Reads how the pairs of a rotary embedding are divided among the axes; a mixin of `ConfigReader`. They are not if
    config.json does not say how and they are not as many as usual: then there are no images.
    """

    default_section: ClassVar[tuple[int, int, int]]
    interleaved_axes: ClassVar[bool]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        section, ropes = given.get("mrope_section"), super().ropes(values, raw)
        if not section and any(rope.rotary_dim // 2 != sum(cls.default_section) for rope in ropes.values()):
            return ropes
        section = section or cls.default_section
        return {
            name: replace(rope, axes=axes_of_pairs(section, rope.rotary_dim // 2, cls.interleaved_axes))
            for name, rope in ropes.items()
        }


def axes_of_pairs(section: Sequence[int], num_pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Return the axis (0 time, 1 row, 2 column) of each pair of a head. `section` has the number of pairs of each axis:
    one axis after another or, interleaved, in turns until rows and columns have theirs, and the rest time.

    E.g. (2, 1, 1) of 4 pairs: 0 0 1 2, or interleaved 0 1 2 0. Raises ValueError if the numbers do not fit.
    """
    if len(section) != 3 or sum(section) != num_pairs:
        raise ValueError(
            f"mrope_section {list(section)} must be three numbers with the sum {num_pairs}, half of head_dim"
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(num_pairs))


class Qwen2VL(AxialRope, Qwen2):
    default_section, interleaved_axes = (16, 24, 24), False
    config_defaults = Qwen2.config_defaults | {
        "model_type": "qwen2_vl_text",
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
    }


_QWEN3 = {"sliding_window": None, "rope_theta": 500000.0, "max_position_embeddings": 128000}


class Qwen3VL(AxialRope, Qwen3):
    default_section, interleaved_axes = (24, 20, 20), True
    config_defaults = Qwen3.config_defaults | _QWEN3 | {"model_type": "qwen3_vl_text"}


class Qwen3VLMoe(AxialRope, Qwen3Moe):
    default_section, interleaved_axes = (24, 20, 20), True
    config_defaults = (
        Qwen3Moe.config_defaults
        | _QWEN3
        | {
            "model_type": "qwen3_vl_moe_text",
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "tie_word_embeddings": True,
        }
    )
    facts = Qwen3Moe.facts | {"norm_topk_prob": True}


class Qwen35VL(AxialRope, Qwen35):
    default_section, interleaved_axes = (11, 11, 10), True


class Qwen35MoeVL(AxialRope, Qwen35Moe):
    default_section, interleaved_axes = (11, 11, 10), True


class PaddleOCRVL(AxialRope, Ernie4_5):
    default_section, interleaved_axes = (16, 24, 24), False
    config_defaults = Ernie4_5.config_defaults | {"model_type": "paddleocr_vl_text"}
    facts = Ernie4_5.facts | {"rope_interleaved": False}
