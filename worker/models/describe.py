"""A description of a model's parts, for `quire check` and docs/models.md. Torch-free."""

from __future__ import annotations

from collections import Counter

from quire.worker.spec.model import LayerSpec, ModelSpec

MIXERS = {
    "attention": "attention",
    "mla": "latent attention (MLA)",
    "bidirectional": "attention to all tokens",
    "none": "no attention",
}


def cache_kind(layer: LayerSpec) -> str:
    """Return the cache of a layer."""
    if layer.kv_from is not None:
        return "cache of an earlier layer"
    if layer.mixer == "mla":
        return "latent" if layer.index is None else "indexed latent"
    if layer.compressed is not None:
        rate = layer.compressed.rate
        return f"window of {layer.window} tokens" + (f" and a key per {rate} tokens" if rate else "")
    if not layer.attends:
        return "state" if layer.state else "none"
    if layer.mixer == "bidirectional":
        return "none"
    if layer.cross_length:
        return f"the encoder's {layer.cross_length} positions"
    if layer.chunk is not None:
        return f"chunk of {layer.chunk} tokens"
    if layer.output_window:
        return f"full, with a window of {layer.output_window} tokens of the output"
    if layer.index is not None:
        return "indexed full"
    kind = "full" if layer.window is None else f"window of {layer.window} tokens"
    return f"{kind} and state" if layer.state else kind


def cache_kinds(spec: ModelSpec) -> str:
    """Return the caches of all layers, e.g. "22 x window of 512 tokens, 4 x full"."""
    counts = Counter(cache_kind(layer) for layer in spec.layers)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def has_stages(spec: ModelSpec) -> bool:
    """Return whether the layers can be divided into pipeline stages."""
    return not (spec.is_encoder or spec.crosses)


def choice(spec: ModelSpec) -> tuple[str, str, str]:
    """Return (setting, value, reason) for the table of choices."""
    return "model", spec.architecture, f"implementation {spec.implementation}; cache per layer: {cache_kinds(spec)}"
