"""Mistral: Llama with a sliding window in every layer, which the spec's `layer_types` says."""

from __future__ import annotations

from quire.worker.models.decoder import CausalLM


class Mistral(CausalLM):
    pass
