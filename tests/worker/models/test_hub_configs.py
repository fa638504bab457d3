"""config.json as published with models of every family, in the spelling of their generation, against transformers' own
reading. `hub_configs.json` has them, with fewer layers where they list something for each.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.worker.models.registry import DECODERS, model_class, parse_model_spec
from quire.worker.spec.moe import RoutingSpec
from tests.worker.models.test_model_config import compare, kinds, ropes

CONFIGS = json.loads(Path(__file__).with_name("hub_configs.json").read_text(encoding="utf-8"))
# of text alone all three axes of positions are the same
NOT_NUMBERS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


def theirs(raw: dict):
    """transformers' configuration."""
    kind = model_class(raw["architectures"][0]).config_defaults["model_type"]  # Kimi K2's is not transformers' own
    return CONFIG_MAPPING[kind].from_dict({key: value for key, value in raw.items() if key != "quantization_config"})


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers_reading(name):
    spec, config = parse_model_spec(CONFIGS[name]), theirs(CONFIGS[name])
    compare(spec, config)
    for layer, kind in zip(spec.layers, kinds(config)):
        if layer.rope is None:
            continue
        mine, numbers = spec.ropes[layer.rope].scaling or {}, ropes(config)[kind]
        for key in numbers.keys() - NOT_NUMBERS:
            assert mine.get(key) == numbers[key], key
    for index, layer in enumerate(spec.layers):
        if layer.moe:
            compare_routing(layer.moe.routing, config, index)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_another_kind_are_refused_or_read(name):
    """Read as a family allows, such as a number for all layers instead of a list."""
    raw = CONFIGS[name]
    for key in raw.keys() - {"architectures", "model_type"}:
        for value in (None, "x", 0, [1], {}):
            with suppress(ValueError):
                parse_model_spec(raw | {key: value})


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen3-30b", "decoder_sparse_step", 0, "decoder_sparse_step 0 does not fit Qwen3MoeForCausalLM: .*by zero"),
        ("gemma-2-9b", "query_pre_attn_scalar", "x", "query_pre_attn_scalar 'x' does not fit Gemma2ForCausalLM"),
        ("granite-3", "logits_scaling", None, "logits_scaling None does not fit GraniteForCausalLM"),
        ("olmo-3", "layer_types", 3, "layer_types 3 does not fit Olmo3ForCausalLM"),
        ("mixtral", "rope_theta", "1e6", "rope_theta must be a positive number, not '1e6'"),
        ("qwen3-yarn", "rope_scaling", "yarn", "rope_scaling must be an object, not 'yarn'"),
    ],
)
def test_refusals_name_the_key(name, key, value, message):
    with pytest.raises(ValueError, match=message):
        parse_model_spec(CONFIGS[name] | {key: value})


def compare_routing(routing: RoutingSpec, config, index: int) -> None:
    def first(keys: tuple[str, ...]):
        value = next(value for key in keys if (value := getattr(config, key, None)) is not None)
        return value[index] if isinstance(value, list) else value

    assert (routing.num_experts, routing.top_k) == (first(EXPERTS), first(CHOSEN))
    assert routing.scale == (getattr(config, "routed_scaling_factor", None) or 1.0)


def test_every_family_is_among_them():
    """Except those whose files have transformers' own spelling, or that transformers lacks (`helpers/twins.py`)."""
    read = {raw["architectures"][0] for raw in CONFIGS.values()}
    assert DECODERS.keys() - read <= {
        "AfmoeForCausalLM",
        "ArceeForCausalLM",
        "AXK1ForCausalLM",
        "BailingHybridForCausalLM",
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "Cohere2MoeForCausalLM",
        "CwmForCausalLM",
        "DeepseekForCausalLM",
        "DeepseekV4ForCausalLM",
        "Dots1ForCausalLM",
        "Dots3NoteForCausalLM",
        "FlexOlmoForCausalLM",
        "Gemma4UnifiedForCausalLM",
        "GemmaForCausalLM",
        "Glm5NextForCausalLM",
        "GlmForCausalLM",
        "GlmMoeDsaForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "HyperCLOVAXForCausalLM",
        "HYV3ForCausalLM",
        "HYV4ForCausalLM",
        "Inkling2ForCausalLM",
        "Jais2ForCausalLM",
        "Kolibri1ForCausalLM",
        "LagunaForCausalLM",
        "Lfm3ForCausalLM",
        "LlamaForCausalLM",
        "MellumForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiniMaxForCausalLM",
        "MiniMaxM1ForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "MiniMaxText01ForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "Mistral4ForCausalLM",
        "MistralLarge4ForCausalLM",
        "MuseGlimmerForCausalLM",
        "OlmoHybridForCausalLM",
        "Plamo2ForCausalLM",
        "Plamo3ForCausalLM",
        "Qwen4ExpForCausalLM",
        "Qwen2ForCausalLM",
        "SolarOpenForCausalLM",
        "Step3p5ForCausalLM",
        "VaultGemmaForCausalLM",
        "YoutuForCausalLM",
        "ZayaForCausalLM",
        "Zamba2ForCausalLM",
    }
