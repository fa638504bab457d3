"""Steps with prompts, replayed in pieces.

A recorder that stops the function at each cut replaces CUDA's, so that padding and dispatch are tested without a GPU.
"""

from __future__ import annotations

import threading

import pytest
import torch

from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import FAMILIES, build_family

PROMPTS = [[7 * i + 5 + j for j in range(length)] for i, length in enumerate([1, 3, 9, 20, 45, 2, 11, 6, 30, 4, 5])]
SAMPLING = [
    SamplingParams(max_tokens=3 + 2 * (i % 5), temperature=float(i % 2), seed=i, logprobs=1, ignore_eos=True)
    for i in range(len(PROMPTS))
]


# name -> operations between its pieces: attention, also with windows, chunks and latents, beside experts; recurrent
# states of each kind, each after a convolution, alone or with attention
KINDS = {
    "llama3": 3,
    "gemma2": 4,
    "qwen3-moe": 2,
    "kimi_k2": 4,
    "llama4": 4,
    "lfm2": 4,
    "qwen3_next": 7,
    "granite4-mamba": 6,
    "falcon_h1": 12,
    "jamba": 6,
    "kimi_linear": 5,
    "minimax": 4,
    "qwen4_exp": 10,
}
SIZES = {"qwen4_exp": {"indexer_budget": 400}}  # an index that chooses keys is not recorded


class Pieces:
    """Replays by running the function again in a thread, which waits at each cut. The static output is its own."""

    def __init__(self, model):
        self.model, self.statics, self.num_replays = model, {}, 0

    def forward(self, input_ids, positions, attn):
        hidden = self.model(input_ids, positions, attn)
        return self.statics.setdefault(len(input_ids), hidden.clone()).copy_(hidden)

    def __call__(self, function):
        num_cuts = 0

        def count():
            nonlocal num_cuts
            num_cuts += 1

        function(count)
        return [lambda i=i: self._replay(function, i, num_cuts) for i in range(num_cuts + 1)]

    def _replay(self, function, i, last):
        self.num_replays += i == 0
        if i == 0:  # a replay that was not finished keeps its own
            self.turn, self.done = threading.Semaphore(0), threading.Semaphore(0)
            threading.Thread(target=self._run, args=(function, self.turn, self.done), daemon=True).start()
        self.turn.release()
        assert self.done.acquire(timeout=60)

    @torch.inference_mode()
    def _run(self, function, turn, done):
        def cut():
            done.release()
            turn.acquire()

        turn.acquire()
        function(cut)
        done.release()


def engine_with_pieces(folder, pieces_of=Pieces, **settings):
    engine = InProcessEngine(folder, **settings)
    runner = engine.executor._worker.runner
    runner.model.model._ops = None  # layers are called one by one, as on a GPU
    recorder = pieces_of(runner.model)
    runner.use_graphs(200, lambda function: function, recorder)
    runner.forward.mixed.forward = recorder.forward
    runner.forward._graphs = dict.fromkeys(runner.forward.recordings)  # steps without prompts run eagerly
    while runner.work_idle():
        pass
    return engine, recorder


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_replayed_and_eager_steps_give_the_same_tokens(name, checkpoint, tmp_path):
    """Prompts in chunks beside decoding requests, larger steps than the largest recording, and hits of prefixes."""
    folder = build_family(name, tmp_path, **SIZES.get(name, {})) if name in FAMILIES else checkpoint(name)
    settings = dict(
        block_size=4, num_gpu_blocks_override=160, max_num_batched_tokens=64, max_num_seqs=48, max_model_len="200"
    )
    eager = InProcessEngine(folder, attention_backend="cpu_paged", **settings)
    want = eager.generate(PROMPTS, SAMPLING)
    eager.close()
    engine, recorder = engine_with_pieces(folder, attention_backend="cpu_paged", **settings)
    mixed = engine.executor._worker.runner.forward.mixed
    assert mixed.sizes == [16, 32, 64] == sorted(mixed._recorded)
    assert {len(recorded.between) for recorded in mixed._recorded.values()} == {KINDS[name]}
    for _ in range(2):
        found = engine.generate(PROMPTS, SAMPLING)
        for one, other in zip(found, want):
            assert one.token_ids == other.token_ids
            scores = [[entry.logprobs[0] for entry in result.logprobs] for result in (one, other)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert recorder.num_replays >= 4
    engine.close()


def test_a_size_that_cannot_be_recorded_is_run_eagerly(checkpoint, caplog):
    class Fails(Pieces):
        def __call__(self, function):
            if len(recorded := engine_sizes) >= 1:
                raise torch.OutOfMemoryError("no room")
            recorded.append(1)
            return super().__call__(function)

    engine_sizes: list[int] = []
    settings = dict(block_size=4, num_gpu_blocks_override=160, max_num_batched_tokens=64, max_model_len="200")
    engine, _ = engine_with_pieces(checkpoint("llama3"), Fails, attention_backend="cpu_paged", **settings)
    assert engine.executor._worker.runner.forward.mixed.sizes == [64]
    assert "steps with prompts of 32 tokens and fewer" in caplog.text and "no room" in caplog.text
    assert all(result.finish_reason for result in engine.generate(PROMPTS[:3], SAMPLING[:3]))
    engine.close()
