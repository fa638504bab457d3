"""`deterministic` with adapters: a request's bits alone, and beside others in chunks, preempted and begun again."""

from __future__ import annotations

import random

import pytest

from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.checkpoints import TOKENIZER_SIZE
from tests.helpers.models.lora import ALL, make_adapter, use

SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
LENGTHS = (1, 5, 17, 40, 90, 33, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("qwen3", {}), ("llama-bias", {}), ("qwen3", {"quantization": "int8"})])
def test_alone_and_beside_others(checkpoint, native_kernels, tmp_path, name, settings):
    folder = checkpoint(name, dtype="bfloat16")
    first, second, third = (
        make_adapter(tmp_path / str(rank), folder, rank, targets=targets, seed=rank)
        for rank, targets in ((4, ALL), (16, ALL), (20, ("q_proj", "down_proj")))
    )
    uses = [[], [use(first)], [use(second)], [use(first, 0.5), use(third)], [use(third), use(first)], [use(second)], []]
    rng = random.Random(0)
    prompts = [[rng.randrange(4, TOKENIZER_SIZE) for _ in range(length)] for length in LENGTHS]
    common = {"block_size": 4, "max_model_len": "120", "enable_lora": True, "deterministic": True} | settings
    alone = InProcessEngine(folder, num_gpu_blocks_override=200, max_num_seqs=1, **common)
    expected = [alone.generate([prompt], SAMPLING, adapters=[one])[0] for prompt, one in zip(prompts, uses)]
    alone.close()
    engine = InProcessEngine(
        folder, num_gpu_blocks_override=36, max_num_seqs=8, max_num_batched_tokens=40, **common
    )
    results = engine.generate(prompts, SAMPLING, adapters=uses)
    engine.close()
    assert sum(result.num_preemptions for result in results) > 0
    for result, wanted in zip(results, expected, strict=True):
        assert (result.error, result.token_ids, result.logprobs) == (None, wanted.token_ids, wanted.logprobs)
