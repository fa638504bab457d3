"""The cross-attention of Whisper's alignment heads is transformers', for several requests in chunks, after preemption,
and divided over ranks.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from quire.engine.messages import Alignment, PoolingParams, SamplingParams
from quire.worker.sampling.alignments import smoothed
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.speech_models import build_whisper
from tests.worker.models.test_whisper import BLOCKS, POSITIONS, audio, features, greedy, prompt

NO_OUTPUT = SamplingParams(max_tokens=0)
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "speculative_config": None}
KEPT = 50  # positions, of 60


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    return build_whisper(folder, POSITIONS), folder


def texts(model) -> list[list[int]]:
    return [[*prompt(model), *range(20 + seed, 20 + seed + length)] for seed, length in ((1, 9), (2, 30), (3, 2))]


def asked(model, prompts: list[list[int]]) -> list[PoolingParams]:
    heads = tuple(map(tuple, model.generation_config.alignment_heads))
    return [PoolingParams("align", alignment=Alignment(heads, len(prompt(model)), KEPT, 7)) for _ in prompts]


def matrices(folder, model, **settings) -> list[np.ndarray]:
    prompts, engine = texts(model), InProcessEngine(str(folder), **SETTINGS | settings)
    try:
        media = [audio(folder, seed) for seed in (1, 2, 3)]
        results = engine.generate(prompts, NO_OUTPUT, media=media, pooling=asked(model, prompts))
    finally:
        engine.close()
    assert [result.error for result in results] == [None] * 3
    return [np.frombuffer(result.pooled, np.float32).reshape(-1, KEPT) for result in results]


def expected(model) -> list[np.ndarray]:
    """From the attention that transformers returns, as `_extract_token_timestamps` of its Whisper treats it."""
    from transformers.models.whisper.generation_whisper import _median_filter

    model.set_attn_implementation("eager")
    found = []
    for seed, text in zip((1, 2, 3), texts(model)):
        with torch.inference_mode():
            out = model(features(seed)[None], decoder_input_ids=torch.tensor([text]), output_attentions=True)
        heads = model.generation_config.alignment_heads
        weights = torch.stack([out.cross_attentions[layer][0, head] for layer, head in heads])
        weights = weights[:, len(prompt(model)) :, :KEPT]
        deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
        found.append(_median_filter((weights - mean) / deviation, 7).mean(0).numpy())
    return found


@pytest.mark.parametrize("most", [64, 7], ids=["whole", "in chunks"])
def test_matrices(built, most):
    model, folder = built
    for matrix, reference in zip(matrices(folder, model, max_num_batched_tokens=most), expected(model), strict=True):
        np.testing.assert_allclose(matrix, reference, atol=2e-3)


@pytest.mark.slow
def test_two_ranks(built):
    model, folder = built
    for matrix, reference in zip(matrices(folder, model, tensor_parallel_size=2), expected(model), strict=True):
        np.testing.assert_allclose(matrix, reference, atol=2e-3)


def test_between_requests_for_text(built):
    """Texts are as without them, and preemption changes no matrix."""
    model, folder = built
    prompts = texts(model)
    params = msgspec.structs.replace(greedy(model), max_tokens=60, ignore_eos=True)
    writes, media = [prompt(model)] * 2, [audio(folder, seed) for seed in (4, 5, 1, 2, 3)]
    found = []
    for blocks in (200, 3 * BLOCKS + 2):
        engine = InProcessEngine(str(folder), num_gpu_blocks_override=blocks, max_num_batched_tokens=16, **SETTINGS)
        try:
            results = engine.generate(
                [*writes, *prompts],
                [params] * 2 + [NO_OUTPUT] * 3,
                media=media,
                pooling=[None, None, *asked(model, prompts)],
            )
        finally:
            engine.close()
        assert [result.error for result in results] == [None] * 5
        found.append(results)
    assert not any(one.num_preemptions for one in found[0]) and any(one.num_preemptions for one in found[1])
    assert [one.token_ids for one in found[0][:2]] == [one.token_ids for one in found[1][:2]]
    for results in found:
        for result, reference in zip(results[2:], expected(model), strict=True):
            np.testing.assert_allclose(np.frombuffer(result.pooled, np.float32), reference.ravel(), atol=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": ((3, 0),)}, "heads must be of 3 layers with 4 heads"),
        ({"heads": ((0, 4),)}, "heads must be of 3 layers with 4 heads"),
        ({"heads": ()}, "heads must be"),
        ({"first": 99}, "must begin within the prompt"),
        ({"positions": 61}, "1 to 60 positions"),
        ({"width": 4}, "must be odd"),
    ],
)
def test_refused_by_the_scheduler(built, engine, changes, message):
    model, folder = built
    (params, *_), media = asked(model, texts(model)), [audio(folder, 1)]
    bad = msgspec.structs.replace(params, alignment=msgspec.structs.replace(params.alignment, **changes))
    with pytest.raises(ValueError, match=message):
        engine.generate(texts(model)[:1], NO_OUTPUT, media=media, pooling=[bad])
    with pytest.raises(ValueError, match="needs audio"):
        engine.generate(texts(model)[:1], NO_OUTPUT, pooling=[params])


@pytest.fixture(scope="module")
def engine(built):
    engine = InProcessEngine(str(built[1]), **SETTINGS)
    yield engine
    engine.close()


@pytest.mark.parametrize("width", [1, 3, 7, 31])
def test_median(width):
    from transformers.models.whisper.generation_whisper import _median_filter

    x = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(smoothed(x, width), _median_filter(x, width))
