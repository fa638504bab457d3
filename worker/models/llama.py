"""Llama 2, 3 and 3.x: the decoder as it is. Biases and rope scaling come from the spec."""

from __future__ import annotations

from quire.worker.models.decoder import CausalLM


class Llama(CausalLM):
    pass
