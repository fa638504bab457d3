"""Counts the recipes for text models in vLLM's collection since February 2026 that quire serves:
`python -m tools.recipes`.

`recipes.json` has them by names in their config.json: an architecture that quire implements or refuses, for wrappers
also the `model_type` of the text part, and for the others their `model_type`, which transformers may run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.worker.models.registry import (
    MODELS,
    REFUSED,
    WRAPPERS,
    model_class,
    parse_model_spec,
    read_model_spec,
    tower_class,
)
from quire.worker.models.wrappers import text_architecture

RECIPES = Path(__file__).with_name("recipes.json")


def main() -> None:
    rows = list(results())
    for recipe, served, how in rows:
        print(f"{'served ' if served else 'refused'}  {recipe:55} {how}")
    print(f"{sum(served for _, served, _ in rows)} of {len(rows)} recipes are served")


def results() -> Iterator[tuple[str, bool, str]]:
    """Yield (recipe, whether it is served, how or why not) of each recipe."""
    for kind, recipes in json.loads(RECIPES.read_text(encoding="utf-8")).items():
        served, how = is_served(kind)
        yield from ((recipe, served, how) for recipe in recipes)


def is_served(kind: str) -> tuple[bool, str]:
    """Return (whether models of a key of `recipes.json` are served, how or why not)."""
    name, _, text = kind.partition(" ")
    if name in REFUSED:
        return False, f"{name}: {REFUSED[name]}"
    try:
        if name in WRAPPERS:
            architecture = text_architecture(name, {"text_config": {"model_type": text}})
            model_class(architecture)
            return True, f"{name}{'' if tower_class(name) else ', text only'}"
        if name in MODELS:
            spec = parse_model_spec({"architectures": [name]} | _NEEDED.get(name, {}))
            return True, f"{name}{f' up to {spec.max_model_len} tokens' if spec.why_shorter else ''}"
        return _by_transformers(name)
    except ValueError as error:
        return False, str(error).splitlines()[0][:150]


# settings without which config.json has no layers
_NEEDED = {
    "Lfm2MoeForCausalLM": {"layer_types": ["conv"], "num_hidden_layers": 1},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*E"},
}


def _by_transformers(model_type: str) -> tuple[bool, str]:
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        return False, f"neither quire nor transformers {transformers.__version__} knows {model_type}"
    config = transformers.CONFIG_MAPPING[model_type]()
    config.architectures = config.architectures or [f"{model_type}, which quire has no file for,"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        read_model_spec(folder)
    return True, f"{model_type}, by transformers"


if __name__ == "__main__":
    main()
