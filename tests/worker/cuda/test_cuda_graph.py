"""Padded replay of decode steps.

A recorder that runs the function again replaces CUDA's, so that padding and dispatch are tested without a GPU.
"""

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from quire.engine.messages import SamplingParams
from quire.worker.batch.graphs import CudaRecorder, padded_sizes
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import FAMILIES, build_family
from tests.helpers.models.lora import ATTENTION, make_adapter, make_expert_adapter, use


class Recorder:
    """Replays by calling the function again; CUDA's graph would overwrite the model's static output."""

    def __init__(self, model):
        self.model, self.statics, self.num_replays = model, {}, 0

    def forward(self, input_ids, positions, attn):
        hidden = self.model(input_ids, positions, attn)
        return self.statics.setdefault(len(input_ids), hidden.clone()).copy_(hidden)

    def __call__(self, function):
        function()

        def replay():
            self.num_replays += 1
            function()

        return replay


def test_padded_sizes_bound_the_waste():
    assert padded_sizes(3) == [1, 2, 3]
    sizes = padded_sizes(256)
    assert sizes[:4] == [1, 2, 4, 8] and sizes[-1] == 256
    large = padded_sizes(1024)
    for num_reqs in range(257, 1025):
        assert next(size for size in large if size >= num_reqs) - num_reqs < num_reqs / 8 + 1
    for num_reqs in range(16, 257):
        size = next(size for size in sizes if size >= num_reqs)
        assert size <= num_reqs * 1.5 and size - num_reqs < 16
    assert padded_sizes(2000)[-1] == 1024  # larger batches run eagerly


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "mistral", "llama4", "lfm2"])
def test_graphs_and_eager_give_the_same_tokens(name, checkpoint, tmp_path):
    folder = build_family(name, tmp_path) if name in FAMILIES else checkpoint(name)
    settings = dict(
        block_size=4, num_gpu_blocks_override=120, max_num_batched_tokens=32, max_num_seqs=7, max_model_len="200"
    )
    prompts = [[7 * i + 5 + j for j in range(length)] for i, length in enumerate([1, 3, 9, 20, 45, 2, 11, 6, 30, 4, 5])]
    sampling = [
        SamplingParams(max_tokens=4 + 3 * (i % 5), temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]

    eager = InProcessEngine(folder, **settings)
    want = [result.token_ids for result in eager.generate(prompts, sampling)]
    eager.close()

    engine = InProcessEngine(folder, **settings)
    runner = engine.executor._worker.runner
    recorder = Recorder(runner.model)
    runner.use_graphs(200, recorder)
    runner.forward.forward = recorder.forward
    while runner.work_idle():
        pass
    recorder.num_replays = 0
    for _ in range(2):
        assert [result.token_ids for result in engine.generate(prompts, sampling)] == want
        engine.scheduler.kv.reset_prefix_cache()
    assert recorder.num_replays > 10 and set(recorder.statics) <= set(runner.forward.sizes)
    assert max(recorder.statics) == 7 and 1 in recorder.statics
    engine.close()


def test_sizes_are_recorded_while_idle_the_largest_first(checkpoint):
    """Recording between requests leaves the cache unchanged: later requests read what earlier ones wrote, and their
    tokens do not change.
    """
    settings = dict(block_size=4, num_gpu_blocks_override=120, max_num_seqs=7, max_model_len="200")
    prompts = [[7 * i + 5 + j for j in range(30)] for i in range(3)]
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine = InProcessEngine(checkpoint("llama3"), **settings)
    assert not engine.executor._worker.work_idle()  # without graphs
    want = [result.token_ids for result in engine.generate(prompts, sampling)]
    runner = engine.executor._worker.runner
    recorded, sizes = [], [(size, False) for size in (7, 4, 2, 1)]
    recorder = Recorder(runner.model)
    runner.use_graphs(200, lambda function: (recorded.append(list(runner.forward._graphs)), recorder(function))[1])
    runner.forward.forward = recorder.forward
    left = []
    for _ in sizes:
        left.append(engine.executor._worker.work_idle())
        assert [result.token_ids for result in engine.generate(prompts, sampling)] == want  # from the prefix cache
    assert left == [True, True, True, False] and not engine.executor._worker.work_idle()
    assert recorded == [sizes[:i] for i in range(len(sizes))]
    assert recorder.num_replays > 0
    engine.close()


@pytest.mark.slow
def test_a_busy_server_records_seldom(checkpoint):
    """At most one recording in any 128 steps, and none for rare sizes: each recording delays all running requests."""
    settings = dict(block_size=4, num_gpu_blocks_override=300, max_num_seqs=7, max_model_len="400")
    engine = InProcessEngine(checkpoint("llama3"), **settings)
    runner = engine.executor._worker.runner
    recorder, at = Recorder(runner.model), []
    runner.use_graphs(400, lambda function: (at.append(runner.forward._num_steps), recorder(function))[1])
    runner.forward.forward = recorder.forward
    requests = [(0, 300), (0, 60), (40, 100), (100, 5), (5, 3)]
    engine.generate(
        [[9 + i] * (1 + 3 * i) for i in range(5)],
        [SamplingParams(max_tokens=sum(request), temperature=0.0, ignore_eos=True) for request in requests],
    )
    assert runner.forward._num_steps > 256 and 2 <= len(at) <= 3 and at[0] >= 8
    assert all(later - earlier >= 128 for earlier, later in itertools.pairwise(at)), at
    engine.close()


def test_what_cannot_be_recorded_runs_eagerly(checkpoint, caplog):
    settings = dict(block_size=4, num_gpu_blocks_override=60, max_num_seqs=4, max_model_len="60")
    prompts, sampling = [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine = InProcessEngine(checkpoint("llama3"), **settings)
    want = [result.token_ids for result in engine.generate(prompts, sampling)]

    def record(function):
        function()
        raise torch.OutOfMemoryError("no room")

    engine.executor._worker.runner.use_graphs(60, record)
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == want
    assert [r.getMessage() for r in caplog.records if "no CUDA graph" in r.getMessage()] == [
        "no CUDA graph for 2 requests, running these steps eagerly: OutOfMemoryError: no room"
    ]
    engine.close()


@pytest.mark.slow
def test_adapters_in_recorded_steps(checkpoint, tmp_path):
    """Rows with adapters that come, go and change their slots, scaled ones and none in one replay; a row with two, and
    adapters of experts, run eagerly.
    """
    folder = checkpoint("qwen3-moe")
    adapters = [make_adapter(tmp_path / str(i), folder, 4 + i, seed=i, targets=ATTENTION) for i in range(4)]
    experts = make_expert_adapter(tmp_path / "experts", folder)
    settings = dict(
        block_size=4, num_gpu_blocks_override=200, max_num_seqs=5, max_model_len="200", enable_lora=True, max_loras=2
    )
    prompts = [[7 * i + 5 + j for j in range(9)] for i in range(5)]
    uses = [
        [[use(adapters[0])], [], [use(adapters[1])], [use(adapters[0], 0.5)], []],
        [[use(adapters[2])], [use(adapters[3])], [], [use(adapters[3])], [use(adapters[2])]],
        [[use(adapters[0]), use(adapters[3])], [use(adapters[0])], [], [], []],
        [[use(experts)], [], [], [use(adapters[1])], []],
        [[], [use(adapters[1])], [use(adapters[1])], [], []],
    ]
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine = InProcessEngine(folder, **settings)
    want = [[one.token_ids for one in engine.generate(prompts, sampling, adapters=some)] for some in uses]
    engine.close()
    assert len({str(tokens) for tokens in want}) == len(uses)

    engine = InProcessEngine(folder, **settings)
    runner = engine.executor._worker.runner
    recorder, replayed, step = Recorder(runner.model), [], runner.adapters.step

    def record(function):
        slots = step.recorded

        def with_slots():
            step.rows, step.recorded = [], slots
            function()
            step.recorded = None

        return recorder(with_slots)

    runner.use_graphs(200, record)
    runner.forward.forward = recorder.forward
    while runner.work_idle():
        pass
    assert list(runner.forward._graphs) == [(size, kind) for kind in (False, True) for size in (5, 4, 2, 1)]
    for some, tokens in zip(uses, want):
        recorder.num_replays = 0
        assert [one.token_ids for one in engine.generate(prompts, sampling, adapters=some)] == tokens
        replayed.append(recorder.num_replays)
    assert replayed == [5, 5, 0, 0, 5]
    engine.close()


class FakeCuda:
    """The part of torch.cuda that a recording uses, writing down what happens on which stream."""

    def __init__(self, monkeypatch, fails=False):
        self.events, self.current, self.fails = [], "main", fails
        for name in ("Stream", "CUDAGraph", "current_stream", "set_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, self.forbidden)

    def Stream(self):
        return FakeStream("side", self)

    def CUDAGraph(self):
        return SimpleNamespace(
            replay=lambda: self.events.append("replay"),
            pool=lambda: "pool",
            capture_begin=self.capture_begin,
            capture_end=self.capture_end,
        )

    def current_stream(self):
        return FakeStream(self.current, self)

    def set_stream(self, stream):
        self.current = stream.name

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def capture_begin(self, pool, capture_error_mode):
        self.events.append(("capture", pool, capture_error_mode))

    def capture_end(self):
        self.events.append("ends")
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    def forbidden(self, *args):
        raise AssertionError("a recording waits for the device, or gives memory back that the next step asks for anew")


@dataclass
class FakeStream:
    name: str
    cuda: FakeCuda

    def wait_stream(self, other):
        self.cuda.events.append(f"{self.name} waits for {other.name}")


def test_recording_warms_up_where_it_captures_and_shares_the_pool(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    record = CudaRecorder()
    replay = record(lambda: cuda.events.append(f"runs on {cuda.current}"))
    replay()
    assert cuda.events == [
        "side waits for main",
        "runs on side",
        "main waits for side",
        ("capture", None, "thread_local"),
        "runs on side",
        "ends",
        "replay",  # the first, which brings the graph to the device
        "replay",
    ]
    record(lambda: None)
    assert cuda.events[-3:] == [("capture", "pool", "thread_local"), "ends", "replay"] and cuda.current == "main"


def test_a_failed_capture_leaves_the_stream_as_it_was(monkeypatch):
    cuda = FakeCuda(monkeypatch, fails=True)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder()(lambda: None)
    assert cuda.current == "main"
