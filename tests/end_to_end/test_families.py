"""Every family against transformers: ragged prompts at once in float32, chunked prefill, preemption, prefix hits."""

from __future__ import annotations

import random
import re
from statistics import median
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.engine.messages import SamplingParams
from quire.worker.messages import most_blocks
from quire.worker.models.registry import read_model_spec
from quire.worker.spec.cache import plan_cache
from quire.worker.spec.index import without_indexes
from quire.worker.spec.model import cache_specs
from tests.helpers.in_process import FORCED_DRAFTS, InProcessEngine
from tests.helpers.models.document_models import correct_names
from tests.helpers.models.families import FAMILIES, VOCAB, WITHOUT_VARIANTS, build_family, redraw
from tests.helpers.models.judges import judge, load_family

NUM_TOKENS = 12
LENGTHS = [1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 25, 32, 33, 47, 64, 65, 90, 100, 127, 128, 200, 350]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def small_engine(folder: str, **settings: Any) -> InProcessEngine:
    """An engine whose pool holds little more than the longest request, so that running requests are preempted. Forced
    drafts of models with recurrent states need spare pages, for which such a pool has no room.
    """
    spec = without_indexes(read_model_spec(folder), 368)
    is_small = not (FORCED_DRAFTS and spec.has_states)
    groups = plan_cache(cache_specs(spec, 4), block_size=4).groups
    return InProcessEngine(
        folder,
        block_size=4,
        num_gpu_blocks_override=most_blocks(groups, 368, 4, 64) + 4 if is_small else None,
        max_num_batched_tokens=64,
        max_num_seqs=24,
        max_model_len="368",
        **settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_logprobs_equal_transformers(name, prompts, tmp_path):
    folder = build_family(name, tmp_path)
    engine = small_engine(folder)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    first = engine.generate(prompts, sampling)
    again = engine.generate(prompts[::-1], sampling)[::-1]
    engine.close()
    attends = any(layer.attends for layer in read_model_spec(folder).layers)  # else no request runs out of blocks
    # with drafts the first requests may end before the blocks do
    preempted = sum(result.num_preemptions for result in first) > 0
    assert FORCED_DRAFTS or preempted is attends, "the pool was not small enough"
    assert sum(result.num_cached_tokens for result in again) > 0, "no prefix was found again"
    reference = load_family(folder)
    for results in (first, again):
        for prompt, result in zip(prompts, results):
            assert result.finish_reason == "length" and result.error is None
            logprobs = [entry.logprobs[0] for entry in result.logprobs]
            wrong, error = judge(reference, prompt, result.token_ids, logprobs)
            assert (wrong, error < 1e-3) == (0, True), f"prompt of {len(prompt)} tokens: {wrong} wrong, error {error}"


_SIGLIP = {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14}
_PROJECTOR = {"projector_output_dim": 16}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True], ids=["wrapper", "bare"])
@pytest.mark.parametrize(
    ("model_type", "text", "vision"),
    [
        ("gemma3", "gemma3", _SIGLIP),
        ("aya_vision", "cohere2", _SIGLIP),
        ("exaone4_5", "exaone4", {"num_key_value_heads": 2, "depth": 1}),
        ("kimi_k25", "kimi_k2", {}),
        ("llava_next", "phi3", {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}),
        ("lfm2_vl", "lfm2", {"model_type": "siglip2_vision_model", "num_patches": 16}),
        ("qwen3_5", "qwen3_5", {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}),
        (
            "qwen3_5_moe",
            "qwen3_5_moe",
            {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
        ),
        ("minicpmv4_6", "qwen3_5", {"image_size": 32, "insert_layer_id": 0}),
        ("mistral3", "ministral3", {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8}),
        ("mistral3", "mistral4", {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8}),
        ("llama4", "llama4", {"image_size": 28, "vision_output_dim": 16, "projector_input_dim": 16} | _PROJECTOR),
    ],
)
def test_the_text_of_a_wrapper(model_type, text, vision, bare, prompts, tmp_path):
    """Also with other names of its tensors: those of older files, or without the head's and the decoder's prefix."""
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text_type, settings = FAMILIES[text]
    if text == "cohere2":
        settings = settings | {"logit_scale": 1.0}  # transformers leaves it out in wrappers
    if text.startswith("qwen3_5"):  # a quarter of each head turns, by three axes
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
        settings = settings | {"rope_parameters": rope}
    others = {
        "lfm2_vl": {"projector_hidden_size": 32},
        "kimi_k25": {"projection_hidden_size": 16},
        "minicpmv4_6": {"image_token_id": 250, "insert_layer_id": 0},
    }
    config = CONFIG_MAPPING[model_type](
        text_config={"model_type": text_type, **settings, "tie_word_embeddings": True},
        vision_config=VISION | vision,
        **others.get(model_type, {}),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    redraw(model)
    model.save_pretrained(tmp_path)
    correct_names(model_type, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if bare:
        language = re.compile(r"^(model\.language_model|language_model\.model)\.")
        renamed = {language.sub("", name): value for name, value in tensors.items() if language.match(name)}
        save_file(renamed, tmp_path / "model.safetensors")
    assert_same_text(model, tmp_path, prompts, language_model_only=bare)


def assert_same_text(model, folder, prompts, **settings) -> None:
    """Compare tokens and logprobs of the checkpoint in `folder` with those of transformers' `model`."""
    engine = InProcessEngine(str(folder), max_model_len="200", **settings)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    chosen = [prompt for prompt in prompts if 1 < len(prompt) < 130][::4]
    results = engine.generate(chosen, sampling)
    engine.close()
    for prompt, result in zip(chosen, results):
        wrong, error = judge(model, prompt, result.token_ids, [entry.logprobs[0] for entry in result.logprobs])
        assert (wrong, error < 1e-3) == (0, True)


@pytest.mark.parametrize("differs", [False, True])
def test_a_separate_head_of_a_tied_model_is_used_if_it_differs(differs, prompts, tmp_path):
    folder = build_family("gemma3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if differs:
        head[:, ::2] *= -1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    assert read_model_spec(folder).tie_word_embeddings is not differs
    engine = InProcessEngine(folder, max_model_len="64")
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    result = engine.generate([prompts[5]], sampling)[0]
    engine.close()
    logprobs = [entry.logprobs[0] for entry in result.logprobs]
    wrong, error = judge(load_family(folder), prompts[5], result.token_ids, logprobs)
    assert (wrong, error < 1e-3) == (0, True)


def test_correction_biases_that_the_files_of_axk1_lack_are_zero(prompts, tmp_path):
    folder = build_family("axk1", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    biases = {name for name in tensors if name.endswith("e_score_correction_bias")}
    unused = {"model.layers.0.post_mlp_layernorm.weight": tensors["model.norm.weight"].clone()}  # of a dense layer
    kept = {name: tensor for name, tensor in tensors.items() if name not in biases}
    save_file(kept | unused, tmp_path / "model.safetensors", {"format": "pt"})
    engine = InProcessEngine(folder, max_model_len="64")
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    result = engine.generate([prompts[5]], sampling)[0]
    engine.close()
    assert len(biases) == 3
    wrong, error = judge(
        load_family(folder), prompts[5], result.token_ids, [entry.logprobs[0] for entry in result.logprobs]
    )
    assert (wrong, error < 1e-3) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_VARIANTS)
def test_bfloat16_where_the_margin_is_clear(name, prompts, tmp_path):
    """The reference computes in float32 with the same weights, so only rounding differs. It may change which experts a
    token passes, so of mixtures of experts the median request is compared.
    """
    folder = build_family(name, tmp_path, dtype="bfloat16")
    engine = InProcessEngine(folder, max_model_len="200", max_num_batched_tokens=64, max_num_seqs=8)
    chosen = [prompt for prompt in prompts if len(prompt) < 130][::4]
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    results = engine.generate(chosen, sampling)
    engine.close()
    reference, errors = load_family(folder), []
    for prompt, result in zip(chosen, results):
        assert result.error is None
        logprobs = [entry.logprobs[0] for entry in result.logprobs]
        _, error = judge(reference, prompt, result.token_ids, logprobs, margin=1.0)
        errors.append(error)
    mixture = any(layer.moe for layer in read_model_spec(folder).layers)
    assert (median(errors) if mixture else max(errors)) < 0.8, errors
