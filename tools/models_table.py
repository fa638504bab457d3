"""Write docs/models.md from the registry of model families: `python -m tools.models_table`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from quire.checkpoints.gguf.architectures import ARCHITECTURES
from quire.worker.layers.quantization.int_at_load import BITS
from quire.worker.models.describe import cache_kind, has_stages
from quire.worker.models.registry import DECODERS, ENCODERS, WRAPPERS, build_model, model_class, parse_model_spec
from quire.worker.spec.model import ModelSpec
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS
from tests.helpers.models.encoders import ENCODERS as TESTED_ENCODERS
from tests.helpers.models.families import text_types
from tests.helpers.twins import TWINS
from tests.worker.models.test_fallback import FAMILIES as FALLBACK

FILE = Path(__file__).parent.parent / "docs" / "models.md"
_HEAD = """# Model families

The families of the table are served from safetensors in float32, bfloat16, float16 or
[quantized](quantization.md), or from GGUF. `make docs` lists the effect of each key of their files
(`model-files.html`).

- Embedding models of these families pool as their `modules.json` says (sentence-transformers); `--pooling lasttoken`
  makes embeddings with any model, `--pooling yes-no` a reranker of a model that answers yes or no; `LLM.embed`,
  `classify` and `score` do so offline.
- Encoders (BERT, RoBERTa, XLM-RoBERTa, ModernBERT, Nomic, EmbeddingGemma) embed and, as classifiers and cross-encoders,
  classify and score: each prompt in one step and without a cache.
- Other causal models of transformers whose attention goes through its interface run as well, on one device
  (`--model-impl`): transformers computes them over quire's attention, prefix cache, scheduler and linear layers.
- Hybrids with recurrent states (Qwen3.5, Qwen3-Next, LFM2, Granite 4-H, Nemotron 3, Kimi-Linear ...) have the same
  prefix cache, over checkpoints of their states.
- Time steps of Mamba 2 have the bounds of `time_step_limit`, by default none, as in the published code, vLLM and
  llama.cpp. transformers bounds those of Nemotron-H and Zamba 2 by `time_step_min` instead, in prompts only.

## The table

Written by `python -m tools.models_table` from the registry, `worker/models/registry.py`. `quire check MODEL` prints the
family, the implementation, the caches and the memory of a model; [a worked change](add-a-model-family.md) adds one.

| architecture | implementation | caches | MLP | quantization | TP / PP / EP | tested |
|---|---|---|---|---|---|---|
"""
# settings that show more kinds of layers than the default configuration
_SERVED = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {"mamba_d_head": 8},
    "GraniteMoeHybridForCausalLM": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "KimiLinearForCausalLM": {"num_hidden_layers": 5},
    "Mamba2ForCausalLM": {"head_dim": 64},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*E"},
}
_TAIL = """
*Tested* means that a tiny random checkpoint, saved by transformers, gives transformers' tokens and log-probabilities in
float32 with chunked prefill, preemption and prefix hits (`tests/helpers/models/`). For families that transformers
lacks, the reference is the published formula (`tests/helpers/twins.py`). Encoders are compared with
sentence-transformers and transformers: embeddings, and logits of classifiers. So is
EmbeddingGemma, a `Gemma3TextModel` whose config.json sets `use_bidirectional_attention`. Texts are cut where
sentence-transformers cuts them (`max_seq_length`, the tokenizer's `model_max_length`), and turned into lower case if
`do_lower_case` is set; `truncate_prompt_tokens: -1` cuts to the same limit, and longer lists of token ids are 400.
`dimensions` is for models that say that their vectors can be shortened (`is_matryoshka`, `matryoshka_dimensions`,
`truncate_dim`; Qwen3, Gemma and Nomic embedders), or with `--matryoshka`. With TP, the number of ranks
must divide the heads and the intermediate size; EP is `--enable-expert-parallel`. With PP, layers that read the caches
of others (Gemma 3n and 4) are on the last stage. Every tested family is also compared over two ranks of each kind
(`test_family_ranks.py`). *Quantization* names the settings of `--quantization` that build the model;
formats of checkpoints (docs/quantization.md) are those of every family, GGUF files those of all that llama.cpp knows.

"""
_REFUSED = """Refused, with the reason, are models
with recurrent layers that are not above (xLSTM, Zaya, RecurrentGemma, RWKV), and models whose
attention does not go through transformers' interface (BLOOM, GPT-J). `python -m tools.recipes` says which of the 95
recipes for text that vLLM's collection gained since February 2026 are served: 85.
"""


def is_tested(architecture: str) -> bool:
    """Whether the tests compare the architecture with transformers."""
    if architecture in ENCODERS:
        return any(architecture.startswith(prefix) for prefix, *_ in TESTED_ENCODERS.values())
    prefixes = {prefix for prefix, _ in (CHECKPOINTS | MOE_CHECKPOINTS).values()}
    tested = text_types() | {make_config()["model_type"] for make_config, *_ in TWINS.values()}
    model_type = model_class(architecture).config_defaults["model_type"]
    return architecture.removesuffix("ForCausalLM") in prefixes or model_type in tested


def builds(spec: ModelSpec, quantization: str) -> bool:
    """Whether the first layers of the model can be built with `--quantization`."""
    try:
        build_model(
            replace(spec, layers=spec.layers[:2]),
            torch.bfloat16,
            torch.device("meta"),
            max_model_len=1,
            quantization=quantization,
        )
    except ValueError:
        return False
    return True


def row(architecture: str) -> str:
    """The line of one architecture, from the spec of its default configuration."""
    spec: ModelSpec = parse_model_spec(
        {"architectures": [architecture], "head_dim": 128} | _SERVED.get(architecture, {})
    )
    cls = model_class(architecture)
    own = [layer for layer in spec.layers if layer.kv_from is None]
    caches = " and ".join(dict.fromkeys(cache_kind(layer).split(" of ")[0] for layer in own))
    mlps = " and ".join(dict.fromkeys(layer.mlp for layer in spec.layers))
    experts = hasattr(cls, "moe")  # Gemma 4 has models with and without
    ways = ["yes", "yes" if has_stages(spec) else "no", "yes" if experts else "-"]
    quantized = ", ".join(bits for bits in BITS if builds(spec, bits))
    proven = "yes" if is_tested(architecture) else "no"
    file = cls.__module__.rsplit(".", 1)[1]
    return f"| `{architecture}` | `{file}.py` | {caches} | {mlps} | {quantized} | {' / '.join(ways)} | {proven} |\n"


def page() -> str:
    """The text of docs/models.md."""
    seeing, text_only = (
        ", ".join(f"`{name}`" for name, wrapper in sorted(WRAPPERS.items()) if bool(wrapper.tower) is images)
        for images in (True, False)
    )
    rows = "".join(row(name) for name in sorted(DECODERS | ENCODERS))
    gguf = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES))
    fallback = ", ".join(f"`{name}`" for name in sorted(FALLBACK))
    text = (
        f"Models that read images ([vision.md](vision.md)): {seeing}. Of these the text part alone is "
        f"served: {text_only}.\n\n"
        f"GGUF files are served of these architectures, by llama.cpp's names: {gguf}.\n\n"
        "Other causal models run in transformers' implementation; compared with it are "
        f"{fallback}. {_REFUSED}"
    )
    return _HEAD + rows + _TAIL + text


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
