"""Out of memory during a step: it runs in parts, with the same result as the whole step.

An allocator with a limit simulates a full device.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.messages import SamplingParams
from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.batch.request_table import RequestTable
from quire.worker.batch.split_step import halves
from quire.worker.cache import allocation as kv_cache
from quire.worker.cache.storage import KVStorage
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.native import KERNELS
from quire.worker.messages import StepInput, StepOutput
from quire.worker.model_runner import ModelRunner
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.parallel import use_groups
from quire.worker.spec.cache import plan_cache
from quire.worker.weights.loader import load_weights
from tests.helpers.in_process import InProcessEngine
from tests.helpers.worker.ranks import run_ranks, thread_groups
from tests.helpers.worker.steps import Script

SETTINGS = dict(
    block_size=4, num_gpu_blocks_override=200, max_num_batched_tokens=48, max_num_seqs=8, max_model_len="200"
)


def limit_tokens(engine: InProcessEngine, limit: int, error: RuntimeError | None = None) -> list[int]:
    """From now on a forward pass over more than `limit` tokens runs out of memory after its first layer. Returns the
    sizes tried.
    """
    runner, tried = engine.executor._worker.runner, []
    forward = runner.forward

    def limited(batch):
        tried.append(len(batch.input_ids))
        hidden = forward(batch)
        if len(batch.input_ids) > limit:
            raise error or torch.OutOfMemoryError("CUDA out of memory")
        return hidden

    runner.forward = limited
    return tried


def requests():
    prompts = [[(13 * i + j) % 480 + 4 for j in range(length)] for i, length in enumerate([3, 45, 1, 20, 70, 9])]
    prompts.append([*prompts[1][:40], 7, 8])  # shares blocks that are written in the same step
    sampling = [
        SamplingParams(
            max_tokens=6 + i,
            temperature=float(i % 2),
            seed=i,
            ignore_eos=True,
            logprobs=1 if i % 3 == 0 else None,
            prompt_logprobs=0 if i == 4 else None,
        )
        for i in range(len(prompts))
    ]
    return prompts, sampling


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 7, 30])
def test_steps_in_parts_give_the_same(checkpoint, limit):
    results = []
    for limited in (False, True):
        engine = InProcessEngine(checkpoint("qwen3"), **SETTINGS)
        tried = limit_tokens(engine, limit if limited else 10**6)
        results.append(engine.generate(*requests()))
        assert (max(tried) > limit) and (not limited or min(tried) <= limit)
        engine.close()
    for whole, parts in zip(*results):
        assert (
            parts.token_ids == whole.token_ids
            and parts.finish_reason == whole.finish_reason == "length"
            and parts.error is None
        )
        assert len(parts.prompt_logprobs) == len(whole.prompt_logprobs)
        for a, b in zip(parts.logprobs + parts.prompt_logprobs, whole.logprobs + whole.prompt_logprobs):
            assert a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_no_memory_at_all_fails_the_requests_and_nothing_else(checkpoint):
    engine = InProcessEngine(checkpoint("qwen3"), **SETTINGS)
    prompts, sampling = requests()
    want = [result.token_ids for result in engine.generate(prompts, sampling)]
    runner = engine.executor._worker.runner
    forward = runner.forward
    limit_tokens(engine, 0)
    assert all(
        result.finish_reason == "error" and "out of memory" in result.error and not result.token_ids
        for result in engine.generate(prompts, sampling)
    )
    runner.forward = forward  # memory is available again: the cache holds no wrong values
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == want
    engine.close()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_halves_are_the_whole_in_order(scheduled, data):
    computed = data.draw(st.lists(st.integers(0, 30), min_size=len(scheduled), max_size=len(scheduled)))
    samples = sorted(data.draw(st.sets(st.integers(0, len(scheduled) - 1))))
    rows = list(range(10, 10 + len(scheduled)))

    def tokens(step: StepInput, positions: list[int]) -> list[tuple[int, int, int]]:
        assert not step.new and not any(step.new_blocks) and len(step.new_blocks) == len(step.rows)
        return [
            (i, row, c + k)
            for i, row, c, n in zip(positions, step.rows, step.num_computed, step.num_scheduled)
            for k in range(n)
        ]

    parts = halves(StepInput(1, [], rows, computed, scheduled, [[] for _ in rows], samples))
    if sum(scheduled) == 1:
        assert parts is None
        return
    first, second = parts
    assert tokens(first.step, first.positions) + tokens(second.step, second.positions) == [
        (i, rows[i], computed[i] + k) for i in range(len(rows)) for k in range(scheduled[i])
    ]
    assert [part.positions[i] for part in parts for i in part.step.samples] == samples
    assert min(sum(part.step.num_scheduled) for part in parts) >= 1


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    ],
)
def test_other_signs_of_too_little_memory(checkpoint, message):
    """A library's workspace, or pinned memory: RuntimeErrors, which the step survives in parts too."""
    results = []
    for limit in (10**6, 7):
        engine = InProcessEngine(checkpoint("qwen3"), **SETTINGS)
        limit_tokens(engine, limit, RuntimeError(message))
        results.append([result.token_ids for result in engine.generate(*requests())])
        engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    ],
)
def test_what_is_no_lack_of_memory_is_not_tried_again(checkpoint, message):
    engine = InProcessEngine(checkpoint("qwen3"), **SETTINGS)
    tried = limit_tokens(engine, 7, RuntimeError(message))
    with pytest.raises(RuntimeError, match=message):
        engine.generate(*requests())
    assert len(tried) == 1
    engine.close()


def ranks_of(folder: str, size: int) -> list[ModelRunner]:
    """Runners that share a model over `size` ranks, each for its own thread."""
    spec, runners = read_model_spec(folder), []
    for group in thread_groups(size):
        with use_groups(tp=group):
            model = build_model(spec, torch.float32, torch.device("cpu"))
            load_weights(model, spec, folder, "auto", seed=0)
            layers = kv_cache.attention_layers(model)
            plan = plan_cache([layer.cache_spec(4) for layer in layers])
            kv_cache.allocate(layers, plan, 60, 4, KVStorage(torch.float32), CpuPlatform())
            table = RequestTable(4, 60, 4, spec.vocab_size, CpuPlatform())
            runners.append(ModelRunner(model, table, CpuPagedAttention(), CpuPlatform(), 48))
    return runners


class Ranks:
    """Runs steps on the ranks of `folder`'s model; `failing` is out of memory in `where` while it runs the step that is
    told to fail.
    """

    def __init__(self, folder: str, failing: int, where: str, monkeypatch: pytest.MonkeyPatch):
        self.runners, self.failing, self.monkeypatch = ranks_of(folder, 2), failing, monkeypatch
        model = self.runners[failing].model
        self.module = {
            "embedding": model.model.embed_tokens,
            "first layer": model.model.layers["0"].mlp,
            "last layer": model.model.layers["2"].self_attn,
            "head": model.lm_head,
        }[where]

    def run(self, step: StepInput, fails: bool = False) -> list[StepOutput]:
        """Return each rank's output."""

        def out_of_memory(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with self.monkeypatch.context() as patch:
            if fails:
                patch.setattr(self.module, "forward", out_of_memory)
            return run_ranks(lambda rank: self.runners[rank].execute(step).result(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["embedding", "first layer", "last layer", "head"])
@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_fail_a_step_together(checkpoint, monkeypatch, where, failing):
    """One of two ranks runs out of memory somewhere in a step: on both its requests fail, that of an unfinished prompt
    too, and the next step is as if nothing had been.
    """
    monkeypatch.setattr(KERNELS, "lib", None)
    ranks = Ranks(checkpoint("qwen3"), failing, where, monkeypatch)
    prompts = [[7 + row + i for i in range(9)] for row in range(3)]

    def play(fails: bool) -> list[list[StepOutput]]:
        script, outputs = Script(4), []

        def run(scheduled: dict[int, int], fails: bool = False) -> None:
            step = script.step(scheduled)
            outputs.append(ranks.run(step, fails))
            script.receive(step, outputs[-1][0])

        for row, prompt in enumerate(prompts):
            script.add(row, prompt)
        run({0: 9})
        run({0: 1, 1: 9, 2: 5}, fails)
        for row in (0, 1):  # all requests, failed or not, release their rows for a new request
            script.add(row, prompts[row])
        run({0: 9, 1: 9})
        run({0: 1, 1: 1})
        return outputs

    want, got = play(False), play(True)
    for rank in (0, 1):
        assert not want[1][rank].errors
        if where == "head" and rank != failing:  # keys and values are all right; whoever sampled fails
            assert set(got[1][rank].errors) == {0, 1} and got[1][rank].token_ids == [[], []]
        else:
            assert all("out of memory" in got[1][rank].errors[i] for i in range(3)), got[1][rank]
        for after, before in zip(got[2:], want[2:]):
            assert after[rank].token_ids == before[rank].token_ids and not after[rank].errors


def test_ranks_that_may_have_sampled_differently_do_not_go_on(checkpoint, monkeypatch):
    """After the exchange of logits the other rank can no longer be told of the failure."""
    monkeypatch.setattr(KERNELS, "lib", None)
    runners = ranks_of(checkpoint("qwen3"), 2)
    script = Script(4)
    script.add(0, [5, 6, 7])
    step = script.step({0: 3})
    monkeypatch.setattr(
        runners[1].sampler, "sample", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    )

    def run(rank):
        try:
            return runners[rank].execute(step).result()
        except torch.OutOfMemoryError as error:
            return error

    fine, failed = run_ranks(run, 2)
    assert not fine.errors and isinstance(failed, torch.OutOfMemoryError)
