"""Qwen 2 and 2.5: biases on q, k and v only, and a sliding window in the upper layers where one is asked for; both are in the spec."""

from __future__ import annotations

from quire.worker.models.decoder import CausalLM


class Qwen2(CausalLM):
    pass
