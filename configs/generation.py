"""Parses `--override-generation-config`: the server's default sampling parameters."""

from __future__ import annotations

import json

# keys of generation_config.json -> the parameters of requests
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "suppress_tokens": "suppress_tokens",
    "max_new_tokens": "max_tokens",
}


def read_generation(text: str) -> dict[str, object]:
    """Read the JSON object `text`. Raises ValueError for an unknown key; the values are checked with the model's."""
    values = json.loads(text)
    if unknown := sorted(values.keys() - PARAMETERS.keys()):
        raise ValueError(f"unknown key {', '.join(unknown)}; the keys are {', '.join(PARAMETERS)}")
    return values
