"""Parses `--limit-mm-per-prompt` and `--media-io-kwargs`, which are vLLM's JSON."""

from __future__ import annotations

import json
from typing import Any

MAX_IMAGES, MAX_VIDEOS = 32, 4  # per prompt by default
MAX_FRAMES, MAX_FPS = 4096, 240.0  # that options may ask for
_DEFAULTS = {"image": MAX_IMAGES, "video": MAX_VIDEOS}
_MODALITIES = ("image", "video", "audio")  # vLLM's
_SIZES = ("width", "height", "num_frames", "length")  # by which vLLM plans memory


def read_media_limits(text: str | None) -> dict[str, int]:
    """Return the maximum number of images and videos of a prompt. Raises ValueError naming the modality and its valid
    values.
    """
    given = json.loads(text or "{}")
    if not isinstance(given, dict):
        raise ValueError(f"must be a JSON object, got {text}")
    counts = {name: _count(name, value) for name, value in given.items()}
    _check_modalities(given)
    for name, count in counts.items():
        if count and name not in _DEFAULTS:
            raise ValueError(f"{name} is {count}, but must be 0: prompts may contain images and videos only")
    return {name: counts.get(name, default) for name, default in _DEFAULTS.items()}


def read_media_io(text: str | None) -> dict[str, Any]:
    """Return how the frames of videos are chosen, `num_frames` and `fps`. Raises ValueError naming the key."""
    given = json.loads(text or "{}")
    if not isinstance(given, dict):
        raise ValueError(f"must be a JSON object, got {text}")
    _check_modalities(given)
    if others := sorted(name for name, value in given.items() if name != "video" and value):
        raise ValueError(f"{others[0]}: only video has settings here")
    chosen = given.get("video") or {}
    if not isinstance(chosen, dict) or chosen.keys() - {"num_frames", "fps"}:
        raise ValueError(f"video must be an object of num_frames and fps, got {json.dumps(chosen)}")
    return {name: value for name, value in chosen.items() if value != -1}  # vLLM's word for the default


def _check_modalities(given: dict[str, Any]) -> None:
    """Raise ValueError for a name that is no modality of vLLM."""
    for name in given:
        if name not in _MODALITIES:
            raise ValueError(f"unknown modality {json.dumps(name)}; the modalities are {', '.join(_MODALITIES)}")


def unused_sizes(text: str | None) -> list[str]:
    """Return the names of checked limits that have no effect: sizes, by which vLLM plans memory."""
    objects = {name: value for name, value in json.loads(text or "{}").items() if isinstance(value, dict)}
    return [f"{name}.{key}" for name, value in objects.items() for key in _SIZES if key in value]


def _count(name: str, value: Any) -> int:
    """Return the number of items of a modality: a number, or vLLM's object with `count` and sizes."""
    if isinstance(value, dict):
        if unknown := sorted(value.keys() - {"count", *_SIZES}):
            raise ValueError(f"{name}: unknown key {', '.join(unknown)}; the keys are count, {', '.join(_SIZES)}")
        value = value.get("count", _DEFAULTS.get(name, 1))
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {json.dumps(value)}, but must be a whole number of at least 0")
    return value
