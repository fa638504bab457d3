"""`--deterministic` on GPUs, under Triton's interpreter: a request has the same bits alone, in a crowd, in chunks of
any size, after preemption and with drafts.
"""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from quire.configs.config import Config
from quire.engine.messages import SamplingParams
from quire.worker import parallel
from quire.worker.cuda import fixed_order
from quire.worker.cuda.kernels import limits, triton_experts, triton_fixed, triton_mla, triton_paged
from quire.worker.layers.mla import multiply_heads
from quire.worker.models.registry import read_model_spec
from quire.worker.worker import Worker
from tests.helpers.in_process import InProcessEngine
from tests.helpers.worker.emulated_gpu import EmulatedGpu, emulated
from tests.helpers.worker.interpreter import needs_loops
from tests.helpers.worker.launches import in_groups
from tests.helpers.worker.steps import Script

pytestmark = [pytest.mark.slow, needs_loops]

NUM_OUTPUTS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = dict(max_num_seqs=4, max_model_len="64", num_gpu_blocks_override=60, block_size=16, dtype="float32")


def test_rows_of_a_product_are_independent():
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((70, 100), (72, 100), (72,)))
    together = triton_fixed.multiply(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(together.double(), exact, rtol=1e-5, atol=1e-4)
    for rows in (slice(5, 6), slice(66, 70), slice(3, 68)):
        assert torch.equal(triton_fixed.multiply(x[rows], weight, bias), together[rows])


def test_products_by_head():
    x, weights = torch.randn(5, 3, 40, device=DEVICE), torch.randn(3, 40, 24, device=DEVICE).transpose(1, 2)
    together = triton_fixed.multiply_heads(x, weights)
    torch.testing.assert_close(together, multiply_heads(x, weights))
    assert torch.equal(triton_fixed.multiply_heads(x[2:3], weights), together[2:3])


def _attend(lengths: list[tuple[int, int]], q, table, attend) -> list[torch.Tensor]:
    """Return the results of requests (context, tokens) with queries that are the last of `q`."""
    counts = torch.tensor([0, *(n for _, n in lengths)], device=DEVICE).cumsum(0).int()
    seq_lens = torch.tensor([length + n for length, n in lengths], device=DEVICE).int()
    parts = torch.cat([q[length : length + n] for length, n in lengths])
    tables = table.expand(len(lengths), -1)
    out = attend(parts, tables, counts, seq_lens, max(n for _, n in lengths))
    return list(out.split([n for _, n in lengths]))


@pytest.mark.parametrize("window, cap", [(None, None), (50, 20.0)])
def test_a_token_attends_alike_in_any_step(window, cap):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(150, 4, 32, generator=generator).to(DEVICE)
    k, v = (torch.randn(12, 16, 2, 32, generator=generator).to(DEVICE) for _ in range(2))
    table = torch.tensor([[3, 1, 4, 2, 5, 9, 7, 6, 8, 10]], device=DEVICE).int()

    def attend(parts, tables, starts, lens, most):
        return triton_paged.paged_attention(
            parts, k, v, tables, starts, lens, most, 0.2, window, cap, fixed_order=True
        )  # fmt: skip

    (whole,) = _attend([(0, 150)], q, table, attend)
    free = triton_paged.paged_attention(
        q, k, v, table, *(torch.tensor(x, device=DEVICE).int() for x in ([0, 150], [150])), 150, 0.2, window, cap
    )
    torch.testing.assert_close(whole, free)
    for step in ([(149, 1)], [(20, 1), (140, 1), (90, 1)], [(0, 37), (37, 80), (117, 2)], [(149, 1), (0, 9)]):
        for (start, count), result in zip(step, _attend(step, q, table, attend)):
            assert torch.equal(result, whole[start : start + count]), (start, count)


def test_a_token_attends_to_latents_alike_in_any_step():
    generator = torch.Generator().manual_seed(3)
    q, cache = torch.randn(60, 4, 48, generator=generator), torch.randn(6, 16, 1, 48, generator=generator)
    q, cache, table = q.to(DEVICE), cache.to(DEVICE), torch.tensor([[3, 1, 4, 2]], device=DEVICE).int()

    def attend(parts, tables, starts, lens, most):
        return triton_mla.latent_attention(parts, cache, 32, tables, starts, lens, most, 0.2, fixed_order=True)

    (whole,) = _attend([(0, 60)], q, table, attend)
    for step in ([(59, 1)], [(0, 13), (13, 40)], [(20, 1), (50, 3)]):
        for (start, count), result in zip(step, _attend(step, q, table, attend)):
            assert torch.equal(result, whole[start : start + count]), (start, count)


def test_a_token_has_the_same_experts_in_any_step():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(90, 32, generator=generator).to(DEVICE)
    stacks = [torch.randn(*shape, generator=generator).to(DEVICE) for shape in ((2, 48, 32), (2, 32, 24))]
    weights, ids = torch.rand(90, 2, generator=generator).to(DEVICE), torch.tensor([[0, 1]] * 90, device=DEVICE)

    def run(rows):
        return triton_experts.fused_experts(
            x[rows], weights[rows], ids[rows], *stacks, None, None, "silu", fixed_order=True
        )

    together = run(slice(0, 90))
    for rows in (slice(7, 8), slice(80, 90), slice(1, 70)):
        assert torch.equal(run(rows), together[rows])


def test_ranks_add_their_parts_in_order(monkeypatch):
    """Whatever the size; other tensors than floats are summed as before."""
    parts = [torch.tensor([[value, 1.0]]) for value in (3e7, 1.0, -3e7, 1.0)]
    group = parallel.ProcessGroup.__new__(parallel.ProcessGroup)
    group.size, group.rank, group._group, group._small = 4, 1, None, None
    monkeypatch.setattr(parallel, "_all_gather", lambda out, x, group: out.copy_(torch.cat(parts).view(-1)))
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda x, group: x.add_(100))
    group._fixed_order = False
    assert group.all_reduce(parts[1].clone()).tolist() == [[101.0, 101.0]]
    group.fix_order()
    assert group.all_reduce(parts[1]).tolist() == [[1.0, 4.0]]  # another order gives 0.0 or 2.0
    assert group.all_reduce(torch.tensor(1)).tolist() == 101 and group.num_exchanges == 3


def _prompt(length: int, seed: int) -> list[int]:
    return [4 + (37 * seed + 11 * i * i + i) % 490 for i in range(length)]


def _play(
    worker: Worker, sampling: SamplingParams, crowd: int = 0, chunk: int = 64, preempt_at: int = -1, adapters=None
):
    """Return the tokens of a request, perhaps with adapters, and their log-probabilities, beside `crowd` others."""
    script, kept = Script(16), []
    for row in range(crowd + 1):
        script.add(row, _prompt(21, 0) if row == 0 else _prompt(3 + 7 * row, row), sampling)
    while len(script.rows[0].outputs) < NUM_OUTPUTS:
        missing = {row: len(state.prompt) + len(state.outputs) - state.computed for row, state in script.rows.items()}
        step = script.step({row: min(count, chunk) for row, count in missing.items()})
        step = in_groups(step, len(worker.runner.table.groups))
        new = [msgspec.structs.replace(one, adapters=adapters or []) if one.row == 0 else one for one in step.new]
        step = msgspec.structs.replace(step, new=new)
        output = worker.execute(step).result()
        assert not output.errors
        script.receive(step, output)
        entries = zip(step.samples, output.logprobs or [])
        kept += [entry for i, found in entries if step.rows[i] == 0 for entry in found]
        if len(script.rows[0].outputs) == preempt_at:
            script.preempt(0)
            preempt_at = -1
    return script.rows[0].outputs, kept


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "mistral", "deepseek-v2"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs there")
def test_bits_of_a_request_do_not_depend_on_others(name, checkpoint):
    sizes = {"num_experts": 4, "num_hidden_layers": 1} if name == "qwen3-moe" else {"num_hidden_layers": 2}
    folder = checkpoint(name, **sizes)
    with emulated(EmulatedGpu()):
        worker = Worker(Config.from_flat(model=folder, deterministic=True, **SIZES))
        worker.initialize(lambda phase, fraction: None)
        assert worker.runner.backend.name == "triton_fixed" and worker.runner.speculator is not None
        _check(worker)
        worker.shutdown()


def _check(worker: Worker) -> None:
    sampling = SamplingParams(temperature=0.9, seed=11, logprobs=2, speculation=False)
    alone = _play(worker, sampling)
    assert len(alone[1]) == NUM_OUTPUTS
    for case in ({"crowd": 3}, {"chunk": 9, "crowd": 1, "preempt_at": 2}):
        assert _play(worker, sampling, **case) == alone, case


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs there")
def test_drafts_are_on_and_change_no_bit(checkpoint):
    repetitive = [5, 6, 7, 8, 9] * 4
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    with emulated(EmulatedGpu()):
        results = []
        for drafts in ('{"method": "none"}', '{"method": "ngram", "num_speculative_tokens": 3}'):
            folder = checkpoint("qwen3", num_hidden_layers=1)
            engine = InProcessEngine(folder, deterministic=True, speculative_config=drafts, **SIZES)
            (one,) = engine.generate([repetitive], sampling)
            results.append((one.token_ids, one.logprobs))
            engine.close()
    assert results[0] == results[1] and len(results[0][0]) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
def test_a_prefix_hit_changes_no_bit(checkpoint):
    prompt = _prompt(45, 3)
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1)
    with emulated(EmulatedGpu()):
        engine = InProcessEngine(checkpoint("qwen3", num_hidden_layers=2), deterministic=True, **SIZES)
        cold, warm = (engine.generate([prompt], sampling)[0] for _ in range(2))
        engine.close()
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 32)
    assert (cold.token_ids, cold.logprobs) == (warm.token_ids, warm.logprobs)


@pytest.mark.parametrize("num_reqs", [1, 2, 44, 300, 1024])
@pytest.mark.parametrize("longest", [1, 2, 16, 700])
def test_tiles_of_attention_do_not_depend_on_the_step(num_reqs, longest):
    """Public reports of servers whose bits are those of the batch size: 44 requests take other splits than 8."""
    meta = (32, 128, 128, 16, 8, num_reqs), (longest, 64, None, True), (0, 0.0, 0, 2)
    plan = triton_paged._plan((num_reqs + longest - 1, *meta[0]), *meta[1:], DEVICE, limits.KNOWN[90])
    one = triton_paged._plan((1, 32, 128, 128, 16, 8, 1), (1, 9, None, True), meta[2], DEVICE, limits.KNOWN[90])
    assert plan.constants == one.constants and plan.num_splits == 1 and not plan.combines


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_bits_on_a_gpu(checkpoint):
    """Alone, in a crowd, in chunks and after preemption, with graphs and without."""
    folder, played = checkpoint("qwen3-moe"), []
    for eager in (True, False):
        settings = dict(model=folder, deterministic=True, enforce_eager=eager, record_graphs="start", **SIZES)
        worker = Worker(Config.from_flat(device="cuda", **settings))
        worker.initialize(lambda phase, fraction: None)
        _check(worker)
        played.append(_play(worker, SamplingParams(temperature=0.0, logprobs=2, speculation=False), crowd=2))
        worker.shutdown()
    assert played[0] == played[1]


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("qwen3", {"attention_backend": "triton_paged"}, "leave --attention-backend triton_paged off"),
    ],
)
def test_what_is_refused(name, settings, words, checkpoint):
    config = Config.from_flat(model=checkpoint(name), deterministic=True, **settings)
    spec = read_model_spec(config.model.model)
    with pytest.raises(ValueError, match=f"--deterministic .*{words}"):
        fixed_order.resolve(config, spec, EmulatedGpu().ops)
    off = Config.from_flat(model=checkpoint(name), **settings)
    assert fixed_order.resolve(off, spec, EmulatedGpu().ops)[0] is False
