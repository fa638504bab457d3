"""Padded replay of decode steps. A recorder that runs the function again stands in for CUDA's, so that the padding and the dispatch are tested without a GPU."""

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from engine.messages import SamplingParams
from tests.in_process import InProcessEngine
from worker.cuda_graph import _CudaRecorder, padded_sizes


class Recorder:
    """Replays by calling the function again; the model's static output is what CUDA's graph would overwrite."""

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
    for num_reqs in range(16, 257):
        size = next(size for size in sizes if size >= num_reqs)
        assert size <= num_reqs * 1.5 and size - num_reqs < 16
    assert padded_sizes(2000)[-1] == 512  # larger batches run eagerly


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_graphs_and_eager_give_the_same_tokens(name, checkpoint):
    settings = dict(block_size=4, num_gpu_blocks_override=120, max_num_batched_tokens=32, max_num_seqs=7, max_model_len="200")
    prompts = [[7 * i + 5 + j for j in range(length)] for i, length in enumerate([1, 3, 9, 20, 45, 2, 11, 6, 30, 4, 5])]
    sampling = [SamplingParams(max_tokens=4 + 3 * (i % 5), temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(len(prompts))]

    eager = InProcessEngine(checkpoint(name), **settings)
    want = [result.token_ids for result in eager.generate(prompts, sampling)]
    eager.close()

    engine = InProcessEngine(checkpoint(name), **settings)
    runner = engine.executor._worker.runner
    recorder = Recorder(runner.model)
    runner.use_graphs(200, recorder)
    runner.forward.forward = recorder.forward
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == want
    assert recorder.num_replays > 10 and set(recorder.statics) <= set(runner.forward.sizes)
    assert max(recorder.statics) == 7 and 1 in recorder.statics
    engine.close()


def test_what_cannot_be_recorded_runs_eagerly(checkpoint, caplog):
    settings = dict(block_size=4, num_gpu_blocks_override=60, max_num_seqs=4, max_model_len="60")
    prompts, sampling = [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    engine = InProcessEngine(checkpoint("llama3"), **settings)
    want = [result.token_ids for result in engine.generate(prompts, sampling)]

    def record(function):
        function()
        raise torch.OutOfMemoryError("no room")

    engine.executor._worker.runner.use_graphs(60, record)
    assert [result.token_ids for result in engine.generate(prompts, sampling)] == want
    assert [r.getMessage() for r in caplog.records if "no CUDA graph" in r.getMessage()] == ["no CUDA graph for 2 requests, these steps run eagerly: OutOfMemoryError: no room"]
    engine.close()


class FakeCuda:
    """The part of torch.cuda that a recording uses, writing down what happens on which stream."""

    def __init__(self, monkeypatch, fails=False):
        self.events, self.current, self.fails = [], "main", fails
        for name in ("Stream", "CUDAGraph", "current_stream", "set_stream", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def Stream(self):
        return FakeStream("side", self)

    def CUDAGraph(self):
        return SimpleNamespace(replay=lambda: self.events.append("replay"), pool=lambda: "pool")

    def current_stream(self):
        return FakeStream(self.current, self)

    def set_stream(self, stream):
        self.current = stream.name

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.events.append(("capture", pool, capture_error_mode))
        self.current = stream.name  # as torch's, which does not set it back when the capture cannot be ended
        yield
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.current = "main"


@dataclass
class FakeStream:
    name: str
    cuda: FakeCuda

    def wait_stream(self, other):
        self.cuda.events.append(f"{self.name} waits for {other.name}")


def test_recording_warms_up_where_it_captures_and_shares_the_pool(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    record = _CudaRecorder()
    replay = record(lambda: cuda.events.append(f"runs on {cuda.current}"))
    replay()
    assert cuda.events == ["side waits for main", "runs on side", "main waits for side", ("capture", None, "thread_local"), "runs on side", "replay"]
    record(lambda: None)
    assert cuda.events[-1] == ("capture", "pool", "thread_local") and cuda.current == "main"


def test_a_failed_capture_leaves_the_stream_as_it_was(monkeypatch):
    cuda = FakeCuda(monkeypatch, fails=True)
    with pytest.raises(RuntimeError, match="not permitted"):
        _CudaRecorder()(lambda: None)
    assert cuda.current == "main"
