"""VaultGemma: Gemma 2 without the norms after attention and the MLP."""

from __future__ import annotations

from quire.worker.models.gemma import Gemma2


class VaultGemma(Gemma2):
    config_defaults = Gemma2.config_defaults | {"model_type": "vaultgemma"}
    facts = Gemma2.facts | {"form": "pre"}
    renames = {"post_attention_layernorm": "pre_feedforward_layernorm"}
