"""Parses `--speculative-config`, which is vLLM's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DRAFT = 64  # draft tokens of one request that a step may verify
METHODS = ("auto", "ngram", "suffix", "grammar", "mtp", "eagle3", "draft_model", "none")
WITH_MODEL = ("draft_model", "eagle3")
# types of drafts of llama.cpp and SGLang -> methods
_TYPES = {
    "none": "none",
    "draft": "draft_model",
    "draft-simple": "draft_model",
    "draft-eagle3": "eagle3",
    "draft-mtp": "mtp",
    "ngram-simple": "ngram",
    "ngram-cache": "ngram",
    "ngram-mod": "ngram",
    "ngram-map-k": "suffix",
    "ngram-map-k4v": "suffix",
    "nextn": "mtp",
    "standalone": "draft_model",
}
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Settings of the drafter: `num_draft` tokens of each request in every step, or None to adapt to their gain.

    `min_match` and `max_match` are how many of the last tokens method ngram looks up.
    """

    method: str = "auto"
    num_draft: int | None = None
    min_match: int | None = None
    max_match: int | None = None
    model: str | None = None  # with methods draft_model and eagle3: folder, GGUF file or Hub id


def read_speculation(text: str) -> SpeculationSettings:
    """Read the JSON object `text`. Raises ValueError naming the key and its valid values."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"must be a JSON object, got {text}")
    inferred = "draft_model" if "model" in values else "ngram" if "prompt_lookup_max" in values else "auto"
    method, model = values.get("method", inferred), values.get("model")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method is {json.dumps(method)}, but must be one of {', '.join(METHODS)}")
    if unknown := sorted(values.keys() - set(_KEYS)):
        raise ValueError(f"unknown key {', '.join(unknown)}; the keys are {', '.join(_KEYS)}")
    num_draft = _whole(values, "num_speculative_tokens", MAX_DRAFT)
    low, high = _whole(values, "prompt_lookup_min", MAX_DRAFT), _whole(values, "prompt_lookup_max", MAX_DRAFT)
    if method != "ngram" and (low is not None or high is not None):
        raise ValueError(f"prompt_lookup_min and prompt_lookup_max belong to method ngram, not to {method}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"prompt_lookup_min is {low}, but must not exceed prompt_lookup_max, which is {high}")
    if method in WITH_MODEL and not (isinstance(model, str) and model):
        raise ValueError(f"method {method} needs a model: its folder{', GGUF file' * (method != 'eagle3')} or Hub id")
    if method not in WITH_MODEL and model is not None:
        raise ValueError(f"model belongs to the methods {' and '.join(WITH_MODEL)}, not to {method}")
    return SpeculationSettings(method, num_draft, low, high, model)


def draft_model_of(text: str | None) -> str | None:
    """Return the draft model or EAGLE-3 head that `--speculative-config` names, or None."""
    return read_speculation(text).model if text is not None else None


def from_parts(given: Mapping[str, str]) -> str:
    """Return `--speculative-config` for texts of other servers' flags, by key. Raises ValueError naming the key."""
    values: dict[str, object] = {}
    for key, text in given.items():
        if key == "method":
            values[key] = _method(text)
        elif key == "model":
            values[key] = text
        elif not text.isdecimal():
            raise ValueError(f"expected a whole number, got {text!r}")
        elif key != "draft_min":
            values[key] = int(text)
        elif int(text) > 1:
            raise ValueError("drafts of any length are verified: leave it out, or set it to 0 or 1")
    if "prompt_lookup_max" in values or "prompt_lookup_min" in values:
        values.setdefault("method", "ngram")
    read_speculation(config := json.dumps(values))
    return config


def _method(text: str) -> str:
    """Return the method for llama.cpp's or SGLang's types, which are separated by commas."""
    types = [name.strip().lower() for name in text.split(",")]
    for name in types:
        if name not in (*_TYPES, *METHODS):
            raise ValueError(f"{name!r} is not one of {', '.join(_TYPES)}")
    methods = {_TYPES.get(name, name) for name in types}
    methods = methods - {"none"} or methods
    if len(methods) == 1:
        return methods.pop()
    if not methods <= {"ngram", "suffix", "mtp"}:
        raise ValueError(f"{text!r}: only lookups and draft-mtp can be combined")
    return "auto" if "mtp" in methods else "suffix"


def _whole(values: dict[str, object], key: str, maximum: int) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise ValueError(f"{key} is {json.dumps(value)}, but must be a whole number from 1 to {maximum}")
    return value
