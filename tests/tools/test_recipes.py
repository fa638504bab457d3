"""The count of public recipes that are served."""

from __future__ import annotations

import json

import pytest

from quire.worker.models.registry import MODELS, REFUSED, WRAPPERS
from tools.model_types import data
from tools.recipes import RECIPES, is_served, results


def test_recipes_are_listed_once():
    listed = [recipe for recipes in json.loads(RECIPES.read_text(encoding="utf-8")).values() for recipe in recipes]
    assert len(listed) == len(set(listed)) == 95


def test_each_key_names_an_architecture_or_a_type_of_transformers():
    for kind in json.loads(RECIPES.read_text(encoding="utf-8")):
        name, _, text = kind.partition(" ")
        assert name in (data()["types"] if not text else ()) or name in {*MODELS, *WRAPPERS, *REFUSED}, kind
        assert bool(text) <= (name in WRAPPERS), kind


@pytest.mark.parametrize(
    ("kind", "served", "how"),
    [
        ("NemotronHForCausalLM", True, "NemotronHForCausalLM"),
        ("Qwen3_5ForConditionalGeneration qwen3_5_text", True, "Qwen3_5ForConditionalGeneration"),
        ("KimiK25ForConditionalGeneration kimi_k2", True, "KimiK25ForConditionalGeneration"),
        ("Exaone4_5_ForConditionalGeneration exaone4", True, "text only"),
        ("Lfm2VlForConditionalGeneration rwkv", False, "with a text part of model_type 'rwkv' is not supported"),
        ("InternS2PreviewForConditionalGeneration", True, "InternS2PreviewForConditionalGeneration"),
        ("GlmMoeDsaForCausalLM", True, "GlmMoeDsaForCausalLM"),
        ("JinaEmbeddingsV5Model", True, "JinaEmbeddingsV5Model"),
    ],
)
def test_whether_and_how(kind, served, how):
    found = is_served(kind)
    assert found[0] is served and how in found[1]


@pytest.mark.slow
def test_most_recipes_are_served():
    """Those by transformers' implementation, too."""
    assert sum(served for _, served, _ in results()) >= 90
