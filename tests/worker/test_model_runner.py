"""`ModelRunner` over real small models, driven by hand-written steps, against transformers; and over a fake model, for
cases that no real model produces.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire.worker.attention.torch_paged import CpuPagedAttention
from quire.worker.batch.request_table import RequestTable
from quire.worker.cache import allocation as kv_cache
from quire.worker.cache.storage import KVStorage
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import NewRequest, SamplingParams, StepInput, StepOutput
from quire.worker.model_runner import ModelRunner
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.spec.cache import plan_cache
from quire.worker.weights.loader import load_weights
from tests.helpers.models.checkpoints import TOKENIZER_SIZE, greedy, load_reference
from tests.helpers.worker.steps import GREEDY, Script

PLATFORM = CpuPlatform()
BLOCK_SIZE, NUM_BLOCKS = 8, 200


def make_runner(
    model, vocab_size: int, *, max_num_reqs=8, max_model_len=128, max_num_tokens=256, dtype=torch.float32
) -> ModelRunner:
    if layers := kv_cache.attention_layers(model):
        kv_cache.allocate(
            layers,
            plan_cache([layer.cache_spec(dtype.itemsize) for layer in layers]),
            NUM_BLOCKS,
            BLOCK_SIZE,
            KVStorage(dtype),
            PLATFORM,
        )
    table = RequestTable(max_num_reqs, max_model_len, BLOCK_SIZE, vocab_size, PLATFORM)
    return ModelRunner(model, table, CpuPagedAttention(), PLATFORM, max_num_tokens)


@pytest.fixture(scope="module")
def real(checkpoint):
    """(runner factory, transformers' model) of one architecture."""
    folder = checkpoint("qwen3")
    spec = read_model_spec(folder)
    model = build_model(spec, torch.float32, PLATFORM.device, 128, ops=CpuPlatform().ops)
    load_weights(model, spec, folder)
    return lambda: make_runner(model, spec.vocab_size), load_reference(folder)


def test_a_result_outlives_the_next_step(checkpoint, native_kernels):
    """The native logits are in memory that the next step reuses."""
    folder = checkpoint("qwen3", dtype="bfloat16")
    spec = read_model_spec(folder)
    model = build_model(spec, torch.bfloat16, PLATFORM.device, 128, ops=CpuPlatform().ops)
    load_weights(model, spec, folder)
    results = []
    for read_at_once in (True, False):
        runner, script = make_runner(model, spec.vocab_size, dtype=torch.bfloat16), Script(BLOCK_SIZE)
        for row, mode in enumerate(("raw_logits", "processed_logits", "raw_logprobs")):
            script.add(
                row, prompt(5, row), SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=2, logprobs_mode=mode)
            )
        outputs = []
        for _ in range(2):
            outputs.append(runner.execute(script.step(dict.fromkeys(range(3), 5))))
            script.rows = {
                row: type(state)(state.prompt, state.sampling, state.outputs) for row, state in script.rows.items()
            }
            script.rows[0].prompt = prompt(5, 9)  # the next step is another one
            if read_at_once:
                outputs[-1] = outputs[-1].result()
        results.append(outputs if read_at_once else [output.result() for output in outputs])
    assert (
        runner.logits.take(1).data_ptr()
        == model.logits(torch.zeros(1, spec.hidden_size, dtype=torch.bfloat16), runner.logits).data_ptr()
    )
    first, second = results
    assert first == second and first[0].logprobs != first[1].logprobs


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(4, TOKENIZER_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(runner: ModelRunner, script: Script, scheduled: dict[int, int]) -> StepOutput:
    step = script.step(scheduled)
    output = runner.execute(step).result()
    assert output.step == step.step
    script.receive(step, output)
    return output


def test_chunked_prefill_mixed_with_decode_equals_transformers(real):
    make, reference = real
    runner, script = make(), Script(BLOCK_SIZE)
    prompts = {0: prompt(5, 0), 3: prompt(40, 1), 1: prompt(1, 2)}
    for row, tokens in prompts.items():
        script.add(row, tokens)
    run(runner, script, {0: 5, 3: 20})
    run(runner, script, {1: 1, 0: 1, 3: 13})
    run(runner, script, {3: 7, 0: 1, 1: 1})  # here row 3 samples for the first time
    for _ in range(9):
        run(runner, script, {0: 1, 1: 1, 3: 1})
    for row, tokens in prompts.items():
        outputs = script.rows[row].outputs
        assert outputs == greedy(reference, tokens, len(outputs))[0] and len(outputs) >= 9, row


def test_the_last_layer_computes_what_is_read(real):
    """One token of each request that samples; all tokens if prompt log-probabilities are requested; one if no request
    samples.
    """
    make, reference = real
    runner, script, seen = make(), Script(BLOCK_SIZE), []
    layers = list(runner.model.model.layers.values())
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        for layer in (layers[0], layers[-1])
    ]
    try:
        script.add(0, prompt(20, 6))
        script.add(1, prompt(9, 7))
        run(runner, script, {0: 12})
        run(runner, script, {0: 8, 1: 5})
        run(runner, script, {0: 1, 1: 4})
        run(runner, script, {0: 1, 1: 1})
        script.add(2, prompt(7, 8), SamplingParams(temperature=0.0, prompt_logprobs=0))
        output = run(runner, script, {0: 1, 1: 1, 2: 7})
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == [12, 1, 13, 1, 5, 2, 2, 2, 9, 9] and len(output.prompt_logprobs[2]) == 6
    for row in range(3):
        outputs = script.rows[row].outputs
        assert outputs == greedy(reference, script.rows[row].prompt, len(outputs))[0], row


def test_two_steps_in_flight_before_the_first_is_read(real):
    """Step n + 1 computes tokens that the host has not seen yet."""
    make, reference = real
    runner, script = make(), Script(BLOCK_SIZE)
    script.add(0, prompt(9, 3))
    first = runner.execute(script.step({0: 9}))
    script.rows[0].outputs.append(-1)  # known to exist, not known
    second = runner.execute(script.step({0: 1}))
    assert second.done()
    assert first.result().token_ids + second.result().token_ids == [
        [token] for token in greedy(reference, prompt(9, 3), 2)[0]
    ]


def test_preemption_and_another_row(real):
    make, reference = real
    runner, script = make(), Script(BLOCK_SIZE)
    script.add(2, prompt(12, 4))
    run(runner, script, {2: 12})
    run(runner, script, {2: 1})
    script.preempt(2)
    script.rows[5] = script.rows.pop(2)  # it comes back in another row, with its outputs, in pieces
    script.add(2, prompt(3, 5))
    run(runner, script, {5: 6, 2: 3})
    run(runner, script, {5: 8, 2: 1})
    run(runner, script, {5: 1})
    assert (
        script.rows[5].outputs == greedy(reference, prompt(12, 4), len(script.rows[5].outputs))[0]
        and len(script.rows[5].outputs) == 4
    )
    assert script.rows[2].outputs == greedy(reference, prompt(3, 5), 2)[0]


def test_logprobs_of_sampled_tokens(real):
    make, reference = real
    runner, script = make(), Script(BLOCK_SIZE)
    script.add(0, prompt(9, 6), SamplingParams(temperature=0.0, logprobs=2))
    script.add(1, prompt(9, 6))
    outputs = [run(runner, script, {0: 9, 1: 9}), run(runner, script, {0: 1, 1: 1})]
    tokens, logprobs, _ = greedy(reference, prompt(9, 6), 2)
    for output, token, logprob in zip(outputs, tokens, logprobs):
        (entry,), nothing = output.logprobs
        assert (
            nothing is None and entry.token_ids[:2] == [token, token] and len(entry.token_ids) == 3 and entry.rank == 1
        )
        assert entry.logprobs[0] == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("num", [0, 3, -1])
def test_prompt_logprobs_in_chunks_of_prompt_and_of_logits(real, monkeypatch, num):
    make, reference = real
    monkeypatch.setattr("quire.worker.sampling.logprobs._CHUNK_ROWS", 4)
    runner, script, tokens = make(), Script(BLOCK_SIZE), prompt(23, 7)
    script.add(0, tokens, SamplingParams(temperature=0.0, prompt_logprobs=num))
    script.add(1, prompt(4, 8))
    entries = []
    for scheduled in ({1: 4, 0: 10}, {0: 1, 1: 1}, {1: 1, 0: 12}, {0: 1}):
        output = run(runner, script, scheduled)
        found = output.prompt_logprobs or {}
        assert set(found) <= {list(scheduled).index(0)}
        entries.append([message for messages in found.values() for message in messages])
    # the last token of a chunk scores the first of the next; outputs are not scored
    assert [len(part) for part in entries] == [10, 1, 11, 0]
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    for position, entry in enumerate([entry for part in entries for entry in part]):
        count = want.shape[1] if num < 0 else num
        assert entry.token_ids[0] == tokens[position + 1] and len(entry.token_ids) == 1 + count
        torch.testing.assert_close(torch.tensor(entry.logprobs), want[position][entry.token_ids], atol=1e-3, rtol=0)
        assert entry.rank == int((want[position] > want[position][tokens[position + 1]]).sum()) + 1


def test_a_step_without_samples(real):
    runner, script = real[0](), Script(BLOCK_SIZE)
    script.add(0, prompt(9, 6))
    output = run(runner, script, {0: 4})
    assert (
        output.token_ids == [] and output.logprobs is None and output.errors is None and output.prompt_logprobs is None
    )


def test_a_refused_request_fails_alone(real):
    make, reference = real
    runner, script = make(), Script(BLOCK_SIZE)
    script.add(0, prompt(9, 6), SamplingParams(temperature=0.0, logit_bias={10**6: 1.0}))
    script.add(1, prompt(9, 6))
    output = run(runner, script, {0: 9, 1: 9})
    assert list(output.errors) == [0] and "logit_bias contains token id 1000000" in output.errors[0]
    assert output.token_ids == [[], greedy(reference, prompt(9, 6), 1)[0]]


class FakeModel(torch.nn.Module):
    """The next token is the sum of the last token and its position; token 7 has logits that are not numbers."""

    spec = SimpleNamespace(is_encoder=False, vision=None, crosses=False)
    failures: dict = {}

    def forward(self, input_ids, positions, attn, hidden=None, wanted=None):
        hidden = torch.stack([input_ids.long(), positions], 1)
        return hidden if wanted is None else hidden[wanted]

    def rounded_logits(self, hidden):
        return None

    def logits(self, hidden, workspace=None):
        logits = torch.zeros(len(hidden), 64)
        logits[torch.arange(len(hidden)), hidden.sum(1) % 64] = 5.0
        logits[hidden[:, 0] == 7] = float("nan")
        return logits

    def largest(self, hidden):
        return None


def test_what_is_not_a_number_fails_its_request_alone():
    runner = make_runner(FakeModel(), 64)
    new = [
        NewRequest(0, [3, 7], 2, [[1]], SamplingParams(temperature=0.0, logprobs=0)),
        NewRequest(1, [3, 5], 2, [[2]], SamplingParams(temperature=0.0, logprobs=0)),
    ]
    output = runner.execute(StepInput(1, new, [0, 1], [0, 0], [2, 2], [[], []], [0, 1])).result()
    assert output.token_ids == [[], [6]] and list(output.errors) == [0] and "not finite" in output.errors[0]
    assert output.logprobs[0] is None and output.logprobs[1][0].token_ids == [6]
    # a step that was scheduled before the error was seen
    output = runner.execute(StepInput(2, [], [0, 1], [2, 2], [1, 1], [[], []], [0, 1])).result()
    assert output.token_ids == [[2], [8]]


def test_the_last_token_of_a_full_context():
    runner = make_runner(FakeModel(), 64, max_model_len=16)
    full = NewRequest(0, list(range(16)), 16, [[1, 2]], GREEDY)
    output = runner.execute(StepInput(1, [full], [0], [0], [16], [[]], [0])).result()
    assert (
        output.token_ids == [[30]]
        and runner.table.token_table[0].tolist() == list(range(16))
        and runner.table.token_table[1].count_nonzero() == 0
    )


def test_random_rows_are_keyed_by_seed_and_position():
    sampling = SamplingParams(temperature=20.0, seed=11, top_p=0.95)
    tokens = []
    for row, company in ((0, False), (3, True)):
        runner, script = make_runner(FakeModel(), 64), Script(BLOCK_SIZE)
        script.add(row, [1, 2, 3], sampling)
        script.add(5, [9], SamplingParams(temperature=3.0, seed=2))
        run(runner, script, {5: 1, row: 3} if company else {row: 3})
        for _ in range(20):
            run(runner, script, {row: 1, 5: 1} if company else {row: 1})
        tokens.append(script.rows[row].outputs)
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 3
