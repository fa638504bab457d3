"""A step must not wait for the device: on a GPU every wait is a gap between two steps.

Without a GPU a dispatch mode detects the operations that would wait; with a GPU torch itself raises at every wait.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quire.configs.config import Config
from quire.worker import memory
from quire.worker.attention.base import AttentionBackend
from quire.worker.batch.request_table import RequestTable
from quire.worker.cache import allocation as kv_cache
from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers import mla, moe, state, views
from quire.worker.limits import resolve_limits
from quire.worker.messages import NewRequest, SamplingParams, StepInput
from quire.worker.model_runner import ModelRunner
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.platforms.ops import Ops
from quire.worker.weights.loader import load_weights
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS, config_of
from tests.helpers.models.families import FAMILIES, family_config

VOCAB_SIZE = 96
WAITING = (
    "aten._local_scalar_dense",
    "aten.item",
    "aten.is_nonzero",
    "aten.equal",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique",
    "aten.unique",
    "aten.bincount",
    "aten.lift_fresh",
)  # the last is torch.tensor(...): a copy from pageable memory


class Platform(CpuPlatform):
    """Marks its own copies, which on a GPU go through pinned memory."""

    copying = False

    def to_device(self, array):
        Platform.copying = True
        tensor = super().to_device(array)
        Platform.copying = False
        return tensor


class NoWaiting(TorchDispatchMode):
    """Raises at an operation that would make the host wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(func).rpartition(".")[0]
        assert name not in WAITING or (name == "aten.lift_fresh" and Platform.copying), f"{func} waits for the device"
        if name in ("aten.index", "aten.index_put", "aten.index_put_"):
            assert not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]), (
                f"{func} with a mask waits for the device to count it"
            )
        if name == "aten.repeat_interleave":
            assert kwargs.get("output_size") is not None, "repeat_interleave without output_size waits for the device"
        return func(*args, **kwargs)


class NoCopies(TorchFunctionMode):
    """Raises where Python code makes a tensor of numbers of the host, which is copied from pageable memory, or moves
    one between devices: the dispatcher shows these as plain copies.
    """

    COPIES = (torch.Tensor.new_tensor, torch.tensor, torch.as_tensor, torch.from_numpy)
    MOVES = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cuda)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not Platform.copying:
            assert func not in self.COPIES, f"{func.__name__} copies from pageable memory, for which the host waits"
            assert func not in self.MOVES, f"{func.__name__} waits for the device"
            if func is torch.Tensor.to:
                devices = [arg for arg in (*args[1:], kwargs.get("device")) if isinstance(arg, str | torch.device)]
                assert not devices, "Tensor.to(device) waits for the device"
        return func(*args, **kwargs)


class NoAttention(AttentionBackend):
    """An attention backend that only has the interface: waits inside its kernels are not tested here."""

    name = "none"

    @classmethod
    def supports(cls, spec):
        return None

    def build(self, meta):
        pass

    def attend(self, call):
        return call.q.new_zeros(*call.q.shape[:2], call.v_cache.shape[-1])


class Model(torch.nn.Module):
    """An embedding and a head."""

    spec = SimpleNamespace(is_encoder=False, vision=None, crosses=False)
    failures: dict = {}

    def __init__(self, device):
        super().__init__()
        self.table = torch.randn(VOCAB_SIZE, 16, generator=torch.Generator().manual_seed(0)).to(device)

    def forward(self, input_ids, positions, attn, hidden=None, wanted=None):
        hidden = torch.nn.functional.embedding(input_ids, self.table) + positions[:, None] * 0.01
        return hidden if wanted is None else hidden[wanted]

    def rounded_logits(self, hidden):
        return None

    def logits(self, hidden, workspace=None):
        return (hidden @ self.table.T).float()

    def largest(self, hidden):
        return None


SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(top_p=0.9, seed=2),
    SamplingParams(top_k=5, seed=3, min_p=0.01),
    SamplingParams(top_k=3, top_p=0.8, logprobs=2),
    SamplingParams(logprobs=-1, logprobs_mode="processed_logprobs", temperature=0.7),
    SamplingParams(prompt_logprobs=1, logprobs=0),
    SamplingParams(presence_penalty=0.5, repetition_penalty=1.1),
    SamplingParams(logit_bias={3: 1.0}, allowed_token_ids=[3, 4, 5]),
    SamplingParams(bad_words_ids=[[3, 4], [5]], min_tokens=3, stop_token_ids=[7], frequency_penalty=0.2),
]


def steps() -> list[StepInput]:
    """Prompts in two chunks, then decoding, and a new request among running ones."""
    rows = list(range(len(SAMPLING)))
    prompts = [[(5 * i + j) % VOCAB_SIZE for j in range(6)] for i in rows]
    new = [NewRequest(i, prompts[i], 6, [[2 * i + 1, 2 * i + 2]], SAMPLING[i]) for i in rows]
    none = [[] for _ in rows]
    again = NewRequest(0, prompts[0] + [9], 6, [[1, 2]], SAMPLING[1])
    return [
        StepInput(1, new, rows, [0] * len(rows), [4] * len(rows), none, []),
        StepInput(2, [], rows, [4] * len(rows), [2] * len(rows), none, rows),
        StepInput(3, [], rows, [6] * len(rows), [1] * len(rows), none, rows),
        StepInput(4, [again], rows, [0] + [7] * (len(rows) - 1), [7] + [1] * (len(rows) - 1), none, rows),
    ]


def make_runner(platform, backend) -> ModelRunner:
    model = Model(platform.device)
    return ModelRunner(model, RequestTable(len(SAMPLING), 40, 8, VOCAB_SIZE, platform), backend, platform, 128)


def test_a_step_launches_without_waiting(monkeypatch):
    monkeypatch.setattr("quire.worker.sampling.arithmetic.block_size", lambda logits: 0)  # what only the CPU does
    runner = make_runner(Platform(), NoAttention())
    with NoWaiting():
        outputs = [runner.execute(step) for step in steps()]
    results = [output.result() for output in outputs]
    assert [len(result.token_ids) for result in results] == [0, 10, 10, 10] and not any(
        result.errors for result in results
    )


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.max().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1], device=x.device),
        lambda x: torch.repeat_interleave(x.long(), x.long().abs()),
    ],
)
def test_the_mode_sees_what_waits(waits):
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        waits(torch.arange(3.0))


class QuietOps(Ops):
    """What CUDA computes by kernels of its own does not wait: experts by a grouped product."""

    @staticmethod
    def fused_experts(x, weights, ids, gate_up, down, *others):
        return x * weights.sum(-1, keepdim=True).to(x.dtype)


def allowed(function):
    """`function`, whose copies are from pinned memory on a GPU."""

    def run(*args):
        before, Platform.copying = Platform.copying, True
        try:
            return function(*args)
        finally:
            Platform.copying = before

    return run


def family_runner(folder: str) -> ModelRunner:
    """The family's model with random weights, as on a GPU but for the device, without attention."""
    spec, platform = read_model_spec(folder), Platform()
    config = Config.from_flat(model=folder, device="cpu", max_model_len="40", block_size=4, max_num_batched_tokens=64)
    limits = resolve_limits(config, spec, CpuPlatform())
    model = build_model(spec, torch.float32, torch.device("cpu"), 40, ops=QuietOps())
    load_weights(model, spec, folder, "dummy")
    model.use(QuietOps())
    cache = memory.cache_plan(config, spec, limits)
    kv_cache.allocate(kv_cache.attention_layers(model), cache, 64, 4, limits.kv, platform)
    kv_cache.allocate_states(kv_cache.state_layers(model), cache, 8, platform)
    table = RequestTable(4, 40, 4, spec.vocab_size, platform, cache.groups)
    return ModelRunner(model, table, NoAttention(), platform, 64)


def family_steps(num_groups: int) -> list[StepInput]:
    """A prompt in two chunks beside a whole one, then decoding."""
    prompt, greedy = [5, 6, 7, 8, 9, 10], SAMPLING[0]
    new = [NewRequest(i, prompt, 6, [[3 * i + 1, 3 * i + 2, 3 * i + 3]] * num_groups, greedy) for i in range(2)]
    return [
        StepInput(1, new, [0, 1], [0, 0], [4, 6], [[], []], [1]),
        StepInput(2, [], [0, 1], [4, 6], [2, 1], [[], []], [0, 1]),
        StepInput(3, [], [0, 1], [6, 7], [1, 1], [[], []], [0, 1]),
    ]


@pytest.mark.slow
# DeepSeek V4 waits: the host reads the positions at which windows of compressed keys begin
@pytest.mark.parametrize("name", sorted({*FAMILIES, *CHECKPOINTS, *MOE_CHECKPOINTS} - {"deepseek_v4"}))
def test_no_family_waits(name, monkeypatch, tmp_path):
    monkeypatch.setattr(
        moe, "ListedExperts", lambda hidden, spec, prefix, weights: moe.StackedExperts(hidden, spec, prefix)
    )
    for module in (views, mla, state):
        monkeypatch.setattr(module, "to_device", allowed(views.to_device))
    config = family_config(name) if name in FAMILIES else config_of(name)
    config.save_pretrained(tmp_path)
    runner = family_runner(str(tmp_path))
    with NoWaiting(), NoCopies():
        outputs = [runner.execute(step) for step in family_steps(len(runner.table.groups))]
    assert [len(output.result().token_ids) for output in outputs] == [1, 2, 2]


@pytest.mark.parametrize(
    "copies",
    [
        lambda x: x / x.new_tensor([2.0]),
        lambda x: x + torch.tensor(2.0),
        lambda x: x.to(torch.device("cpu")),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.cpu(),
    ],
)
def test_the_mode_sees_copies(copies):
    with pytest.raises(AssertionError, match="waits"), NoCopies():
        copies(torch.arange(3.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_torch_sees_no_wait_on_the_gpu():
    from quire.worker.cuda.device import CudaPlatform

    platform = CudaPlatform(0)
    platform.start(None, 1)
    results = []
    for checked in (False, True):  # the first time kernels compile and libraries start, which waits
        runner = make_runner(platform, NoAttention())
        runner.execute(StepInput(0, [NewRequest(0, [1], 1, [[1]], SAMPLING[0])], [0], [0], [1], [[]], [0])).result()
        if checked:
            torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = [runner.execute(step) for step in steps()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([output.result() for output in outputs])
    assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]
    assert kv_cache.attention_layers(runner.model) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "name", ["qwen3", "olmo3", "gemma3", "cohere", "qwen3-moe", "gpt-oss", "deepseek-v3", "llama4"]
)
def test_an_engine_of_a_family_does_not_wait_on_the_gpu(name, tmp_path, monkeypatch):
    (family_config(name) if name in FAMILIES else config_of(name)).save_pretrained(tmp_path)
    settings = {"load_format": "dummy", "max_num_seqs": 4, "max_model_len": "120", "num_gpu_blocks_override": 120}
    engine = InProcessEngine(str(tmp_path), device="cuda", record_graphs="start", **settings)
    runner = engine.executor._worker.runner
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, ignore_eos=True)
    prompts = [[5, 6, 7], [8] * 20, [9, 10], [11] * 50]
    try:
        engine.generate(prompts, sampling)  # compiles, which waits
        execute = runner.execute

        def checked(step):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return execute(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(runner, "execute", checked)
        assert not any(result.error for result in engine.generate(prompts, sampling))
        assert all(getattr(runner.forward, "_graphs", {}).values())
    finally:
        engine.close()
