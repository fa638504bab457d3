"""`--limit-mm-per-prompt`: vLLM's JSON, read and checked."""

from __future__ import annotations

import json
from typing import Any

MAX_IMAGES = 32  # per prompt by default
_MODALITIES = ("image", "video", "audio")  # vLLM's
_SIZES = ("width", "height", "num_frames", "length")  # by which vLLM plans memory


def read_media_limits(text: str | None) -> int:
    """Return the maximum number of images of a prompt. Raises ValueError naming the modality and its valid values."""
    given = json.loads(text or "{}")
    if not isinstance(given, dict):
        raise ValueError(f"must be a JSON object, got {text}")
    counts = {name: _count(name, value) for name, value in given.items()}
    for name, count in counts.items():
        if name not in _MODALITIES:
            raise ValueError(f"unknown modality {json.dumps(name)}; the modalities are {', '.join(_MODALITIES)}")
        if count and name != "image":
            raise ValueError(f"{name} is {count}, but must be 0: prompts may contain images only")
    return counts.get("image", MAX_IMAGES)


def unused_sizes(text: str | None) -> list[str]:
    """Return the names of checked limits that have no effect: sizes, by which vLLM plans memory."""
    objects = {name: value for name, value in json.loads(text or "{}").items() if isinstance(value, dict)}
    return [f"{name}.{key}" for name, value in objects.items() for key in _SIZES if key in value]


def _count(name: str, value: Any) -> int:
    """Return the number of items of a modality: a number, or vLLM's object with `count` and sizes."""
    if isinstance(value, dict):
        if unknown := sorted(value.keys() - {"count", *_SIZES}):
            raise ValueError(f"{name}: unknown key {', '.join(unknown)}; the keys are count, {', '.join(_SIZES)}")
        value = value.get("count", MAX_IMAGES if name == "image" else 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {json.dumps(value)}, but must be a whole number of at least 0")
    return value
