"""The whole engine against transformers' greedy decoding: every architecture, ragged prompts, a small step budget,
preemption, prefix hits.
"""

import random

import pytest
import torch

from quire.engine.messages import SamplingParams
from tests.helpers.in_process import FORCED_DRAFTS, InProcessEngine
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS, TOKENIZER_SIZE, load_reference
from tests.helpers.models.judges import judge, opinion

pytestmark = pytest.mark.slow

NUM_TOKENS = 20
LENGTHS = [1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 64, 65, 90, 100, 127, 128, 200, 300, 450, 600, 700]


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(4, TOKENIZER_SIZE) for _ in range(length)] for length in LENGTHS]


# Sliding windows free blocks, and three layers of two kinds form three groups. Indexes have a group of their own.
POOLS = {"mistral": 60, "gpt-oss": 215, "qwen2-window": 300, "deepseek-v32": 375, "glm-5": 375}


def engine_for(folder, num_blocks=190, **settings):
    """An engine whose pool holds little more than the longest request, in small blocks, so that some running requests
    are preempted.
    """
    return InProcessEngine(
        folder,
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=64,
        max_num_seqs=24,
        max_model_len="740",
        **settings,
    )


@pytest.mark.parametrize("name", [*CHECKPOINTS, *MOE_CHECKPOINTS])
def test_float32_tokens_and_logprobs(name, checkpoint, prompts):
    folder = checkpoint(name)
    engine = engine_for(folder, POOLS.get(name, 190))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)

    first = engine.generate(prompts, sampling)
    again = engine.generate(prompts[::-1], sampling)[::-1]  # this small pool caches only the latest requests
    engine.close()

    # with drafts the first requests may end before the blocks do
    assert FORCED_DRAFTS or sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    assert sum(result.num_cached_tokens for result in again) > 0, "no prefix was found again"
    reference = load_reference(folder)
    for results in (first, again):
        for prompt, result in zip(prompts, results):
            assert result.finish_reason == "length" and result.error is None
            assert [entry.token_ids[0] for entry in result.logprobs] == result.token_ids
            assert len(result.token_ids) == NUM_TOKENS
            logprobs = [entry.logprobs[0] for entry in result.logprobs]
            wrong, error = judge(reference, prompt, result.token_ids, logprobs)
            assert (wrong, error < 1e-3) == (0, True), f"prompt of {len(prompt)} tokens: {wrong} wrong, error {error}"


@pytest.mark.parametrize("name", list(CHECKPOINTS))
def test_bfloat16_where_the_margin_is_clear(name, checkpoint, prompts):
    """The reference computes in float32 with the same weights, so only our rounding differs (measured: up to 0.9 per
    logit, the same as transformers' bfloat16).
    """
    folder = checkpoint(name, dtype="bfloat16")
    reference = load_reference(folder)
    engine = engine_for(folder, POOLS.get(name, 190), dtype="bfloat16")
    chosen = prompts[::3]
    results = engine.generate(chosen, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    engine.close()
    compared = 0
    for prompt, result in zip(chosen, results):
        leads, _ = opinion(reference, tuple(prompt), tuple(result.token_ids))
        assert len(leads) == NUM_TOKENS and leads.max() < 0.6, (
            f"prompt of {len(prompt)} tokens: another token than the {leads.argmax() + 1}. leads by {leads.max():.2f}"
        )
        compared += int((leads == 0).sum())
    assert compared > 0.5 * len(chosen) * NUM_TOKENS


def test_depth_does_not_change_tokens(checkpoint, prompts):
    outputs = []
    for depth in (1, 2, 3):
        engine = engine_for(checkpoint("qwen3"), steps_in_flight=depth)
        outputs.append(
            [
                result.token_ids
                for result in engine.generate(
                    prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
                )
            ]
        )
        engine.close()
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_seeded_request_gives_the_same_tokens_alone_in_a_crowd_after_preemption_and_resubmitted(checkpoint, prompts):
    sampling = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.95, top_k=50 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    engine = engine_for(checkpoint("llama3"))
    crowd = engine.generate(prompts, sampling)
    assert FORCED_DRAFTS or sum(result.num_preemptions for result in crowd) > 0
    for i in (0, 7, 14, 20):
        assert engine.generate([prompts[i]], [sampling[i]])[0].token_ids == crowd[i].token_ids
        resumed = engine.generate([prompts[i]], [sampling[i]], outputs=[crowd[i].token_ids[:9]])[0]
        assert crowd[i].token_ids[:9] + resumed.token_ids == crowd[i].token_ids
    engine.close()


def test_prompt_logprobs_equal_a_dense_forward(checkpoint, prompts):
    folder = checkpoint("qwen3")
    reference = load_reference(folder)
    chosen = [prompts[i] for i in (1, 5, 12, 16, 21)]
    engine = engine_for(folder)
    results = engine.generate(chosen, SamplingParams(max_tokens=0, prompt_logprobs=2))
    engine.close()
    for prompt, result in zip(chosen, results):
        with torch.inference_mode():
            logprobs = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        assert result.token_ids == [] and len(result.prompt_logprobs) == len(prompt) - 1
        for position, entry in enumerate(result.prompt_logprobs):
            assert entry.token_ids[0] == prompt[position + 1]
            torch.testing.assert_close(
                entry.logprobs[0], float(logprobs[position, prompt[position + 1]]), atol=1e-3, rtol=0
            )
            torch.testing.assert_close(
                entry.logprobs[1:3], logprobs[position].topk(2).values.tolist(), atol=1e-3, rtol=0
            )
            assert entry.rank == int((logprobs[position] > logprobs[position, prompt[position + 1]]).sum()) + 1
