"""Write docs/models.md from the registry of model families: `python -m tools.models_table`."""

from __future__ import annotations

from pathlib import Path

from quire.worker.models import DECODERS, ENCODERS, WRAPPERS, model_class, parse_model_spec
from quire.worker.models.config import ModelSpec
from quire.worker.models.describe import cache_kind, has_stages
from tests.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS
from tests.encoders import ENCODERS as TESTED_ENCODERS
from tests.families import FAMILIES

FILE = Path(__file__).parent.parent / "docs" / "models.md"
_HEAD = """# Model families

Written by `python -m tools.models_table` from the registry, `worker/models/__init__.py`. `quire check MODEL` prints the
family, the implementation, the caches and the memory of a model.

| architecture | implementation | caches | MLP | TP / PP / EP | tested |
|---|---|---|---|---|---|
"""
_TAIL = """
*Tested* means that a tiny random checkpoint, saved by transformers, gives transformers' tokens and log-probabilities in
float32 with chunked prefill, preemption and prefix hits (`tests/families.py`, `tests/checkpoints.py`). Weights
may be quantized, by `--quantization` or in the checkpoint (docs/quantization.md). With TP, the number of ranks must
divide the heads and the intermediate size; EP is `--enable-expert-parallel`. Encoders are compared with
sentence-transformers and transformers (`tests/encoders.py`): embeddings, and logits of classifiers.

"""


def is_tested(architecture: str) -> bool:
    """Whether the tests compare the architecture with transformers."""
    if architecture in ENCODERS:
        return any(architecture.startswith(prefix) for prefix, *_ in TESTED_ENCODERS.values())
    prefixes = {prefix for prefix, _ in (CHECKPOINTS | MOE_CHECKPOINTS).values()}
    model_type = model_class(architecture).config_defaults["model_type"]
    return architecture.removesuffix("ForCausalLM") in prefixes or model_type in {kind for kind, _ in FAMILIES.values()}


def row(architecture: str) -> str:
    """The line of one architecture, from the spec of its default configuration."""
    spec: ModelSpec = parse_model_spec({"architectures": [architecture], "head_dim": 128})
    cls = model_class(architecture)
    own = [layer for layer in spec.layers if layer.kv_from is None]
    caches = " and ".join(dict.fromkeys(cache_kind(layer).split(" of ")[0] for layer in own))
    mlps = " and ".join(dict.fromkeys(layer.mlp for layer in spec.layers))
    experts = any(layer.mlp == "moe" for layer in spec.layers)
    ways = ["yes", "yes" if has_stages(spec) else "no", "yes" if experts else "-"]
    proven = "yes" if is_tested(architecture) else "no"
    file = cls.__module__.rsplit(".", 1)[1]
    return f"| `{architecture}` | `{file}.py` | {caches} | {mlps} | {' / '.join(ways)} | {proven} |\n"


def page() -> str:
    """The text of docs/models.md."""
    wrappers = ", ".join(f"`{name}`" for name in sorted(WRAPPERS))
    rows = "".join(row(name) for name in sorted(DECODERS | ENCODERS))
    text = (
        f"Of wrappers the text part is served: {wrappers}. Other causal models run in transformers' implementation.\n"
    )
    return _HEAD + rows + _TAIL + text


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
