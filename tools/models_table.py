"""Writes docs/models.md from the registry of model families: `python -m tools.models_table`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from quire.checkpoints.gguf.architectures import ARCHITECTURES
from quire.worker.layers.quantization.int_at_load import BITS
from quire.worker.models.describe import cache_kind, has_stages
from quire.worker.models.qwen4_exp import INDEX_KEYS
from quire.worker.models.registry import DECODERS, ENCODERS, WRAPPERS, build_model, model_class, parse_model_spec
from quire.worker.spec.model import LayerSpec, ModelSpec
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS
from tests.helpers.models.encoders import EMBEDDERS
from tests.helpers.models.encoders import ENCODERS as TESTED_ENCODERS
from tests.helpers.models.families import text_types
from tests.helpers.twins import TWINS
from tests.worker.models.test_fallback import FAMILIES as FALLBACK

FILE = Path(__file__).parent.parent / "docs" / "models.md"
_HEAD = """# Model families

Families with a file of their own are served from safetensors in float32, bfloat16, float16 or
[quantized](quantization.md), or from GGUF. `quire check MODEL` prints the family, the implementation, the caches and
the memory of a model; `make docs` lists the effect of each key of its files (`model-files.html`).
[A worked change](add-a-model-family.md) adds a family.

- Embedding models pool as their `modules.json` says (sentence-transformers). `--pooling lasttoken` makes embeddings
  with any model, `--pooling yes-no` a reranker of a model that answers yes or no; `LLM.embed`, `classify` and `score`
  do so offline.
- Other causal models of transformers whose attention goes through its interface run on one device (`--model-impl`):
  transformers computes them over quire's attention, prefix cache, scheduler and linear layers. Those whose layers keep
  a state in transformers' cache classes (Zamba, hybrids by `--model-impl transformers`) run one request after another,
  slowly, with a warning. Other encoders and classifiers, of tokens by `/pooling`, run prompt by prompt.
- [The table of all model types](model-types.md) says how each is served, or why not.
- Hybrids with recurrent states have the same prefix cache, over checkpoints of their states.

## The list

Written by `python -m tools.models_table` from `worker/models/registry.py`: implementation, kinds of caches, experts,
architectures. Tensor parallelism works for all (the number of ranks divides the heads and the intermediate size),
pipeline stages for all but encoders (layers that read others' caches are on the last stage),
`--enable-expert-parallel` for those with experts.

"""
SEEING = {name: wrapper for name, wrapper in WRAPPERS.items() if wrapper.folder != "audio"}
# settings that show more kinds of layers than the default configuration
_SERVED = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {"mamba_d_head": 8},
    "GraniteMoeHybridForCausalLM": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "KimiLinearForCausalLM": {"num_hidden_layers": 5},
    "Mamba2ForCausalLM": {"head_dim": 64},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*E"},
    "Qwen4ExpForCausalLM": dict.fromkeys(INDEX_KEYS, 1) | {"indexer_head_dim": 256},
}
_TAIL = """
Tests compare tokens and log-probabilities with transformers', or with the published formula; encoders with
sentence-transformers.

Texts for encoders are cut where sentence-transformers cuts them (`max_seq_length`, `model_max_length`) and get lower
case if `do_lower_case` is set; `truncate_prompt_tokens: -1` cuts to the same limit, longer lists of token ids get 400.
`dimensions` needs a model that supports it (`is_matryoshka`, `matryoshka_dimensions`, `truncate_dim`; Qwen3, Gemma and
Nomic embedders), or `--matryoshka`.

"""
_REFUSED = """Models that keep their state elsewhere (xLSTM, RecurrentGemma,
RWKV) or attend outside transformers' interface (BLOOM, GPT-J) are refused.
93 of the 95 recipes for text that vLLM gained since February 2026 are served (`python -m tools.recipes`).
"""


def is_tested(architecture: str) -> bool:
    """Return whether the tests compare the architecture with a reference."""
    if architecture in ENCODERS:
        return any(architecture.startswith(prefix) for prefix, *_ in (TESTED_ENCODERS | EMBEDDERS).values())
    prefixes = {prefix for prefix, _ in (CHECKPOINTS | MOE_CHECKPOINTS).values()}
    tested = text_types() | {make_config()["model_type"] for make_config, *_ in TWINS.values()}
    model_type = model_class(architecture).config_defaults["model_type"]
    return architecture.removesuffix("ForCausalLM") in prefixes or model_type in tested


def _few_experts(layer: LayerSpec) -> LayerSpec:
    """Return the layer with the fewest experts that its routing allows: building 512 takes seconds."""
    if (moe := layer.moe) is None:
        return layer
    routing = moe.routing
    of_a_group = max(-(-routing.top_k // routing.top_groups), routing.group_best)
    count = min(routing.num_experts, routing.num_groups * of_a_group)
    return replace(layer, moe=replace(moe, routing=replace(routing, num_experts=count)))


def builds(spec: ModelSpec, quantization: str) -> bool:
    """Return whether the first layers of the model can be built with `--quantization`."""
    try:
        build_model(
            replace(spec, layers=tuple(map(_few_experts, spec.layers[:2]))),
            torch.bfloat16,
            torch.device("meta"),
            max_model_len=1,
            quantization=quantization,
        )
    except ValueError:
        return False
    return True


def parts(architecture: str) -> tuple[str, str]:
    """Return the file and the traits (caches, experts) of an architecture's default configuration."""
    spec = default_spec(architecture)
    own = [cache_kind(layer).split(" of ")[0] for layer in spec.layers if layer.kv_from is None]
    traits = [kind for kinds in own for kind in kinds.split(" and ") if kind != "none"]
    if any("moe" in layer.mlp for layer in spec.layers):
        traits.append("experts")
    elif hasattr(model_class(architecture), "moe"):
        traits.append("experts in some")
    file = model_class(architecture).__module__.rsplit(".", 1)[1]
    return file, ", ".join(dict.fromkeys(traits)) or "no cache"


def default_spec(architecture: str) -> ModelSpec:
    """Return the spec of an architecture's default configuration."""
    config = {"architectures": [architecture], "head_dim": 128} | _SERVED.get(architecture, {})
    return parse_model_spec(config)


def names(architectures: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(architectures))


def exceptions(architectures: Iterable[str]) -> str:
    """Return sentences about architectures that differ from the rules of the page."""
    specs = {name: default_spec(name) for name in architectures}
    found = {
        "Not tested": [name for name in specs if not is_tested(name)],
        "No pipeline stages": [name for name in specs if not has_stages(specs[name]) and name not in ENCODERS],
        f"No `--quantization` {' or '.join(BITS)}": [
            name for name in specs if not all(builds(specs[name], bits) for bits in BITS)
        ],
    }
    return " ".join(f"{title}: {names(group)}." for title, group in found.items() if group) + "\n"


def page() -> str:
    """Return the text of docs/models.md."""
    seeing, text_only = (
        names(name for name, wrapper in SEEING.items() if bool(wrapper.tower) is images) for images in (True, False)
    )
    hearing = names(WRAPPERS.keys() - SEEING.keys())
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(DECODERS | ENCODERS):
        groups.setdefault(parts(name), []).append(name)
    rows = "".join(f"- `{file}.py` ({traits}): {names(group)}\n" for (file, traits), group in sorted(groups.items()))
    text = (
        f"Models that read images ([vision.md](vision.md)): {seeing}.\n\n"
        f"Models that transcribe audio ([audio.md](audio.md)): {hearing}.\n\n"
        f"Models with images or sound that are served as text only: {text_only}.\n\n"
        f"GGUF architectures, by llama.cpp's names: {names(ARCHITECTURES)}.\n\n"
        "Tests compare these models that run in transformers' implementation with it: "
        f"{names(FALLBACK)}. {_REFUSED}"
    )
    return _HEAD + rows + _TAIL + exceptions(DECODERS | ENCODERS) + "\n" + text


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
