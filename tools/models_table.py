"""Write docs/models.md from the registry of model families: `python -m tools.models_table`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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

These families are served from safetensors in float32, bfloat16, float16 or [quantized](quantization.md), or from GGUF.
`make docs` lists the effect of each key of their files (`model-files.html`).

- Embedding models pool as their `modules.json` says (sentence-transformers); `--pooling lasttoken` makes embeddings
  with any model, `--pooling yes-no` a reranker of a model that answers yes or no.
- Encoders (BERT, RoBERTa, XLM-RoBERTa, ModernBERT, Nomic, EmbeddingGemma) embed; as classifiers and cross-encoders they
  classify and score. Each prompt takes one step and no cache.
- Other causal models whose attention goes through transformers' interface run on one device (`--model-impl`), computed
  by transformers over quire's attention, prefix cache, scheduler and linear layers.
- Models with recurrent states have the same prefix cache, over [checkpoints](architecture.md#cache-groups) of their
  states.
- Time steps of Mamba 2 have the bounds of `time_step_limit` (default: none), as in the published code, vLLM and
  llama.cpp. transformers bounds those of Nemotron-H and Zamba 2 by `time_step_min` instead, in prompts only.

## The table

`python -m tools.models_table` writes it from the registry, `worker/models/registry.py`. `quire check MODEL` prints the
family, the implementation, the caches and the memory of a model; [a worked change](add-a-model-family.md) adds one.

| implementation | caches | MLP | architectures |
|---|---|---|---|
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
With tensor parallelism the number of ranks must divide the heads and the intermediate size. With pipeline stages,
layers that read the caches of others (Gemma 3n and 4) are on the last stage.

A tested architecture gives transformers' tokens and log-probabilities in float32 for a tiny random checkpoint, with
chunked prefill, preemption, prefix hits, and over two ranks of each kind (`tests/helpers/models/`). For families that
transformers lacks, the reference is the published formula (`tests/helpers/twins.py`). Encoders are compared with
sentence-transformers and transformers: embeddings, and logits of classifiers.

Texts to embed are cut where sentence-transformers cuts them (`max_seq_length`, the tokenizer's `model_max_length`), and
lowered if `do_lower_case` is set; `truncate_prompt_tokens: -1` cuts to the same limit, and longer lists of token ids
are 400. `dimensions` needs a model whose vectors can be shortened (`is_matryoshka`, `matryoshka_dimensions`,
`truncate_dim`; Qwen3, Gemma and Nomic embedders), or `--matryoshka`.

"""
_REFUSED = """Refused, with the reason: recurrent layers that are not above (xLSTM, Zaya, RecurrentGemma, RWKV), and
attention that does not go through transformers' interface (BLOOM, GPT-J). `python -m tools.recipes` lists which of the
95 recipes for text that vLLM's collection gained since February 2026 are served: 85.
"""


@dataclass(frozen=True)
class Row:
    """The facts of one architecture, from the spec of its default configuration."""

    architecture: str
    file: str
    caches: str
    mlps: str
    has_stages: bool
    has_experts: bool
    quantizations: tuple[str, ...]
    tested: bool


def is_tested(architecture: str) -> bool:
    """Return whether the tests compare the architecture with transformers."""
    if architecture in ENCODERS:
        return any(architecture.startswith(prefix) for prefix, *_ in TESTED_ENCODERS.values())
    prefixes = {prefix for prefix, _ in (CHECKPOINTS | MOE_CHECKPOINTS).values()}
    tested = text_types() | {make_config()["model_type"] for make_config, *_ in TWINS.values()}
    model_type = model_class(architecture).config_defaults["model_type"]
    return architecture.removesuffix("ForCausalLM") in prefixes or model_type in tested


def builds(spec: ModelSpec, quantization: str) -> bool:
    """Return whether the first layers of the model can be built with `--quantization`."""
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


def read_row(architecture: str) -> Row:
    """Return the facts of an architecture."""
    spec: ModelSpec = parse_model_spec(
        {"architectures": [architecture], "head_dim": 128} | _SERVED.get(architecture, {})
    )
    cls = model_class(architecture)
    own = [layer for layer in spec.layers if layer.kv_from is None]
    return Row(
        architecture=architecture,
        file=cls.__module__.rsplit(".", 1)[1] + ".py",
        caches=", ".join(dict.fromkeys(cache_kind(layer).split(" of ")[0] for layer in own)),
        mlps=", ".join(dict.fromkeys(layer.mlp for layer in spec.layers)),
        has_stages=has_stages(spec),
        has_experts=hasattr(cls, "moe"),  # Gemma 4 has models with and without
        quantizations=tuple(bits for bits in BITS if builds(spec, bits)),
        tested=is_tested(architecture),
    )


def table(rows: list[Row]) -> str:
    """Return one line for all architectures with the same file, caches and MLPs."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row.file, row.caches, row.mlps), []).append(row.architecture)
    return "".join(
        f"| `{file}` | {caches} | {mlps} | {names(architectures)} |\n"
        for (file, caches, mlps), architectures in sorted(groups.items())
    )


def names(words: Iterable[str]) -> str:
    """Return the words as code, in their order, each once."""
    return ", ".join(f"`{word}`" for word in dict.fromkeys(words))


def exceptions(rows: list[Row]) -> str:
    """Return the paragraph that says which architectures differ from the rest in ranks, quantization and tests."""
    experts = [row.file for row in rows if row.has_experts and "moe" not in row.mlps]
    stages = all_but(row.file for row in rows if not row.has_stages)
    expert_parallel = all_but(row.file for row in rows if not row.has_experts and "moe" in row.mlps)
    quantized = all_but(row.architecture for row in rows if set(row.quantizations) != set(BITS))
    tested = all_but(row.architecture for row in rows if not row.tested)
    return f"""
| feature | architectures |
|---|---|
| tensor parallelism | all |
| pipeline stages | {stages} |
| `--enable-expert-parallel` | of those with `moe` {expert_parallel}; {names(experts)} |
| `--quantization {"`, `".join(BITS)}` | {quantized} |
| tested | {tested} |
"""


def all_but(words: Iterable[str]) -> str:
    """Return "all", with the words as exceptions if there are any."""
    words = list(words)
    return f"all but {names(words)}" if words else "all"


def page() -> str:
    """Return the text of docs/models.md."""
    seeing, text_only = (
        names(name for name, wrapper in sorted(WRAPPERS.items()) if bool(wrapper.tower) is images)
        for images in (True, False)
    )
    rows = [read_row(name) for name in sorted(DECODERS | ENCODERS)]
    text = (
        f"Models that read images ([vision.md](vision.md)): {seeing}. Served without images: {text_only}.\n\n"
        f"GGUF files, by llama.cpp's names: {names(sorted(ARCHITECTURES))}.\n\n"
        f"Compared with transformers' own implementation: {names(sorted(FALLBACK))}. {_REFUSED}"
    )
    return _HEAD + table(rows) + exceptions(rows) + _TAIL + text


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
