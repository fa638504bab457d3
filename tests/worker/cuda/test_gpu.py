"""Whole models on a GPU: every way of running a step gives the same tokens as the CPU.

In float32, where rounding changes no token; then in bfloat16.
"""

from __future__ import annotations

import pytest
import torch

from quire.engine.executor.multiproc import MultiprocExecutor
from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SETTINGS = dict(max_num_seqs=16, max_model_len="400", num_gpu_blocks_override=700)
MODES = {
    "eager, one step at a time": dict(enforce_eager=True, steps_in_flight=1),
    "eager, overlapped": dict(enforce_eager=True),
    "graphs": dict(steps_in_flight=1),
    "graphs, overlapped": {},
    "torch attention": dict(attention_backend="cpu_paged", enforce_eager=True),
    "small steps, little memory": dict(max_num_batched_tokens=32, num_gpu_blocks_override=60),
}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[(11 * i + 3 * j) % 490 + 4 for j in range(1 + 9 * i)] for i in range(14)]
    return prompts, [
        SamplingParams(
            max_tokens=12 + 2 * i,
            temperature=0.0 if i % 3 else 0.8,
            top_p=0.9 if i == 3 else 1.0,
            seed=i,
            ignore_eos=True,
        )
        for i in range(14)
    ]


def run(folder: str, **settings) -> list[list[int]]:
    engine = InProcessEngine(folder, **{**SETTINGS, **settings})
    try:
        while engine.executor.workers.work_idle():  # records graphs, if the platform has them
            pass
        results = engine.generate(*requests())
        assert not any(result.error for result in results)
        return [result.token_ids for result in results]
    finally:
        engine.close()


@pytest.fixture(scope="module", params=["qwen3", "llama3", "qwen2", "mistral"])
def model(request, checkpoint):
    folder = checkpoint(request.param)
    return folder, run(folder, device="cpu")


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_cpu(model, mode):
    folder, want = model
    got = run(folder, device="cuda", **MODES[mode])
    # the uniform number that picks a token may fall on an edge that rounding moves, and what follows is then another
    # text
    equal = [a == b for a, b in zip(got, want)]
    assert sum(equal) >= len(equal) - 1 and all(equal[i] for i in range(len(equal)) if i % 3), equal


@pytest.mark.parametrize("backend", ["flash_attn_3", "flash_attn_4", "flash_attn_2", "triton_paged"])
def test_bfloat16_graphs_choose_what_eager_steps_find_best(checkpoint, backend):
    """Padding and splits change rounding, so tokens may diverge; but each token must be the best one, or nearly, of an
    eager run in the same context.
    """
    folder = checkpoint("qwen3", dtype="bfloat16", head_dim=64)
    prompts = [[(7 * i + j) % 490 + 4 for j in range(5 + 11 * i)] for i in range(11)]
    settings = {**SETTINGS, "device": "cuda", "attention_backend": backend}
    try:
        graphs = InProcessEngine(folder, **settings)
    except ValueError as error:
        pytest.skip(str(error))
    while graphs.executor.workers.work_idle():
        pass
    outputs = [
        result.token_ids
        for result in graphs.generate(prompts, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    ]
    assert graphs.executor._worker.runner.forward._graphs
    graphs.close()
    eager = InProcessEngine(folder, enforce_eager=True, **settings)
    scores = eager.generate(
        [prompt + output for prompt, output in zip(prompts, outputs)], SamplingParams(max_tokens=0, prompt_logprobs=1)
    )
    eager.close()
    for prompt, output, result in zip(prompts, outputs, scores):
        for token, entry in zip(output, result.prompt_logprobs[len(prompt) - 1 :], strict=True):
            assert entry.token_ids[0] == token and entry.logprobs[0] >= entry.logprobs[1] - 0.1


def test_out_of_memory_while_serving_is_survived_takes_all_memory(checkpoint):
    """A memory limit far below what a large step needs: the step is cut, and the tokens stay."""
    folder = checkpoint("qwen3")
    engine = InProcessEngine(folder, device="cuda", enforce_eager=True, **SETTINGS)
    want = [result.token_ids for result in engine.generate(*requests())]
    runner = engine.executor._worker.runner
    whole = runner.model.forward
    hog: list[torch.Tensor] = []

    def forward(input_ids, *args):
        if len(input_ids) > 100:  # takes all there is, so that an allocation of the device's own fails
            free, _ = torch.cuda.mem_get_info()
            hog.append(torch.empty(max(free - (64 << 20), 0), dtype=torch.uint8, device="cuda"))
            try:
                torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
            finally:
                hog.clear()
        return whole(input_ids, *args)

    runner.model.forward = forward
    results = engine.generate(*requests())
    engine.close()
    assert [result.token_ids for result in results] == want and not any(result.error for result in results)


def test_two_ranks_share_the_gpu_over_gloo(checkpoint, monkeypatch):
    folder = checkpoint("qwen3")
    want = run(folder, device="cuda", enforce_eager=True)
    monkeypatch.setattr(MultiprocExecutor, "worker_class", "tests.helpers.worker.gpu_ranks:SharedGpuWorker")
    got = run(folder, device="cuda", enforce_eager=True, tensor_parallel_size=2, gpu_memory_utilization=0.3)
    assert sum(a == b for a, b in zip(got, want)) >= len(want) - 1
