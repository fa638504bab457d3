"""`--deterministic` of models with recurrent states: a request's bits do not depend on how its prompt is cut, on what
runs beside it, on prefix hits, preemptions or a crash.
"""

from __future__ import annotations

import random

import pytest
import torch

from quire.engine.messages import SamplingParams
from quire.worker.layers import rowwise
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import VOCAB, build_family

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=3)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
LATENT = {"hidden_size": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16}
MODELS = {
    "qwen3_5": SIZES,
    "lfm2": SIZES,
    "nemotron_h": SIZES,
    "minimax": SIZES,
    "mamba": {},
    "qwen3_5_moe": SIZES | {"num_experts": 20},  # the gate of a shared expert
    "nemotron_h-experts": SIZES,  # a router in float32
    "bailing_hybrid": LATENT,  # latent attention, and a router in float32 that chooses among groups
}


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


OTHERS = [words(1, 30), words(2, 99), words(3, 5)]
PROMPT = words(0, 203)


def engine_for(folder: str, **settings) -> InProcessEngine:
    sizes = {"block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 4, "max_model_len": "512"}
    return InProcessEngine(folder, **sizes | {"dtype": "bfloat16", "deterministic": True} | settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_however_a_prompt_is_computed(name, native_kernels, tmp_path):
    folder = build_family(name, tmp_path, dtype="bfloat16", **MODELS[name])
    engine = engine_for(folder)
    (alone,) = engine.generate([PROMPT], GREEDY)
    want = alone.token_ids, alone.logprobs
    again = engine.generate([PROMPT, *OTHERS], GREEDY)[0]
    assert again.num_cached_tokens == 192 and (again.token_ids, again.logprobs) == want
    engine.generate([PROMPT[:75] + OTHERS[0]], GREEDY)
    assert engine.scheduler.kv.reset_prefix_cache()
    # as an engine that died after 4 tokens is asked again
    (resumed,) = engine.generate([PROMPT], GREEDY, outputs=[want[0][:4]])
    assert (resumed.token_ids, resumed.logprobs) == (want[0][4:], want[1][4:])
    engine.close()
    engine = engine_for(folder, max_num_batched_tokens=37)
    preempt_after_outputs(engine, 4)
    result = engine.generate([*OTHERS, PROMPT], GREEDY)[3]
    assert result.num_preemptions == 1 and (result.token_ids, result.logprobs) == want
    engine.close()


def preempt_after_outputs(engine: InProcessEngine, number: int) -> None:
    """Preempt the request with PROMPT once it has a number of outputs."""
    schedule = engine.scheduler.schedule

    def preempting():
        for request in list(engine.scheduler.running):
            mine = request.num_prompt_tokens == len(PROMPT) and not request.num_preemptions
            if mine and request.num_output_tokens >= number:
                engine.scheduler._preempt(request)
        return schedule()

    engine.scheduler.schedule = preempting


@pytest.mark.parametrize("function", [rowwise.sigmoid, rowwise.silu, rowwise.softplus, rowwise.l2_norm])
@pytest.mark.parametrize("width", [4, 5, 24])
def test_a_row_has_the_same_bits_in_any_tensor(function, width):
    torch.manual_seed(0)
    x = torch.randn(65, 3, width) * 4
    whole = function(x)
    for size in (1, 2, 7, 33):
        assert torch.equal(torch.cat([function(part.clone()) for part in x.split(size)]), whole)


def test_the_functions_are_those_of_torch():
    x = torch.linspace(-100.0, 100.0, 4001)
    for ours, theirs in (("sigmoid", torch.sigmoid), ("silu", torch.nn.functional.silu)):
        torch.testing.assert_close(getattr(rowwise, ours)(x), theirs(x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rowwise.softplus(x), torch.nn.functional.softplus(x), atol=1e-6, rtol=1e-5)
