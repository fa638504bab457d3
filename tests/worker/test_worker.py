"""A worker, from its configuration to tokens."""

from __future__ import annotations

import multiprocessing
import shutil
import time

import pytest
import torch

from quire.configs.config import Config
from quire.worker.cache import allocation as kv_cache
from quire.worker.cpu.device import CpuPlatform
from quire.worker.messages import SamplingParams
from quire.worker.sampling import logprobs, sampler
from quire.worker.sampling.processors import Penalties
from quire.worker.startup import measuring
from quire.worker.worker import Worker
from tests.helpers.models.checkpoints import TOKENIZER_SIZE, greedy, load_reference
from tests.helpers.models.families import build_family
from tests.helpers.worker.steps import Script

PROMPT = torch.randint(4, TOKENIZER_SIZE, (20,), generator=torch.Generator().manual_seed(0)).tolist()


def _worker(folder, **settings) -> Worker:
    return Worker(
        Config.from_flat(
            **{
                "model": folder,
                "device": "cpu",
                "max_num_seqs": 4,
                "max_model_len": "256",
                "num_threads": 1,
                **settings,
            }
        )
    )


def test_initialize_reports_phases_and_what_it_found(checkpoint):
    phases, worker = [], _worker(checkpoint("qwen3"))
    ready = worker.initialize(lambda phase, fraction: phases.append((phase, fraction)))
    assert list(dict.fromkeys(phase for phase, _ in phases)) == [
        "loading weights",
        "profiling memory",
        "allocating KV cache",
    ]
    for phase in {phase for phase, _ in phases}:
        fractions = [fraction for name, fraction in phases if name == phase]
        assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert (ready.max_model_len, ready.max_num_seqs, ready.vocab_size, ready.default_depth) == (256, 4, 512, 1)
    assert ready.num_blocks == 4 * -(-256 // ready.block_size) + 1
    assert ready.plan.weights >= sum(parameter.nbytes for parameter in worker.runner.model.parameters())
    assert {"dtype", "num_threads", "cpu_level", "attention_backend", "block_size"} <= {
        name for name, _, _ in ready.choices
    }
    layers = kv_cache.attention_layers(worker.runner.model)
    assert [layer.layer_index for layer in layers] == [0, 1, 2]
    assert all(
        layer.k_cache.shape == layer.v_cache.shape == (ready.num_blocks, ready.block_size, 2, 32) for layer in layers
    )
    # a block head by head; beside it are the same block of the other layers
    caches = [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)]
    assert all(cache[1].transpose(0, 1).is_contiguous() and not cache.is_contiguous() for cache in caches)
    assert all(layer.k_cache[0].count_nonzero() == 0 and layer.v_cache[0].count_nonzero() == 0 for layer in layers)
    assert sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in layers) == ready.plan.kv_cache
    worker.shutdown()
    worker.shutdown()


def test_a_small_model_keeps_little_of_its_cache_resident(checkpoint):
    """Also when idle, and with a large cache: 8 times the model, or 64 MiB, are made resident ahead of use."""
    worker = _worker(checkpoint("qwen3"), max_num_seqs=64, max_model_len="512", num_gpu_blocks_override=1 << 14)
    ready = worker.initialize(lambda phase, fraction: None)
    most = (64 << 20) + (2 << 20) * 6  # whole pages, of six tensors
    assert ready.plan.kv_cache > 2 * most
    tensors = [
        cache for layer in kv_cache.attention_layers(worker.runner.model) for cache in (layer.k_cache, layer.v_cache)
    ]
    size = len(tensors) * worker.warmer._idle_bytes
    assert size <= most and len(tensors) * worker.warmer._busy_bytes <= most
    deadline = time.monotonic() + 30
    while not worker.warmer._complete and worker.warmer._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(tensors) * worker.warmer._resident <= most
    worker.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_execute(checkpoint, dtype):
    folder = checkpoint("llama3")
    worker = _worker(folder, dtype=dtype)
    ready = worker.initialize(lambda phase, fraction: None)
    script = Script(ready.block_size)
    script.add(1, PROMPT)
    for scheduled in ({1: 13}, {1: 7}, {1: 1}, {1: 1}):
        step = script.step(scheduled)
        script.receive(step, worker.execute(step).result())
    tokens, _, margins = greedy(load_reference(folder, dtype), PROMPT, 3)
    # Rounding to bfloat16 moves these logits by up to about 0.2, in transformers too.
    sure = next((i for i, margin in enumerate(margins) if dtype == "bfloat16" and margin < 0.3), 3)
    assert script.rows[1].outputs[:sure] == tokens[:sure] and len(script.rows[1].outputs) == 3
    worker.shutdown()


def test_dummy_weights_need_only_a_configuration(checkpoint, tmp_path):
    shutil.copy(f"{checkpoint('qwen2')}/config.json", tmp_path)
    worker = _worker(str(tmp_path), load_format="dummy")
    ready = worker.initialize(lambda phase, fraction: None)
    script = Script(ready.block_size)
    script.add(0, PROMPT, SamplingParams(seed=3))
    step = script.step({0: 20})
    assert 0 <= worker.execute(step).result().token_ids[0][0] < 512
    worker.shutdown()


def test_user_errors_come_before_loading(checkpoint):
    for settings, words in (
        ({"max_model_len": "99999"}, "set it to at most 2048"),
        ({"attention_backend": "none"}, "--attention-backend is 'none', but must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            _worker(checkpoint("qwen3"), **settings).initialize(lambda phase, fraction: pytest.fail("started to load"))


def _two_rank_config(folder: str) -> Config:
    return Config.from_flat(
        model=folder, device="cpu", max_num_seqs=4, max_model_len="256", num_threads=1, tensor_parallel_size=2
    )


def _serve_rank_1(folder: str, init_method: str, steps, outputs) -> None:
    worker = Worker(_two_rank_config(folder), 1, 2, init_method)
    ready = worker.initialize(lambda phase, fraction: None)
    outputs.put((ready.num_blocks, ready.block_size))
    while (step := steps.get()) is not None:
        outputs.put(worker.execute(step).result().token_ids)
    worker.shutdown()


@pytest.mark.slow
def test_two_ranks_sample_the_same_tokens_as_one(checkpoint, tmp_path):
    folder, init_method = checkpoint("qwen3"), f"file://{tmp_path}/rendezvous"
    context = multiprocessing.get_context("spawn")
    steps, outputs = context.Queue(), context.Queue()
    other = context.Process(target=_serve_rank_1, args=(folder, init_method, steps, outputs), daemon=True)
    other.start()
    worker = Worker(_two_rank_config(folder), 0, 2, init_method)
    ready = worker.initialize(lambda phase, fraction: None)
    assert outputs.get(timeout=60) == (ready.num_blocks, ready.block_size)
    alone = _worker(folder, block_size=ready.block_size)
    try:
        script = Script(ready.block_size)
        script.add(0, PROMPT)
        script.add(3, PROMPT[:7], SamplingParams(temperature=0.8, top_p=0.9, seed=5))
        sent = []
        for scheduled in ({0: 13, 3: 7}, {0: 7, 3: 1}, {0: 1, 3: 1}):
            sent.append(script.step(scheduled))
            steps.put(sent[-1])
            output = worker.execute(sent[-1]).result()
            assert outputs.get(timeout=60) == output.token_ids
            script.receive(sent[-1], output)
        steps.put(None)
        other.join(60)
        assert other.exitcode == 0
    finally:
        other.kill()
        worker.shutdown()
    alone.initialize(lambda phase, fraction: None)
    results = [alone.execute(step).result().token_ids for step in sent]
    assert [token for step in results for token in step[-1]] == script.rows[3].outputs and [
        results[1][0],
        results[2][0],
    ] == [[t] for t in script.rows[0].outputs]
    alone.shutdown()


def test_the_step_that_is_measured_takes_what_sampling_can_take(checkpoint, monkeypatch):
    """The memory plan includes penalties and log-probabilities of every row and of the prompt."""

    class Measured(CpuPlatform):
        measures_memory, in_use = True, 0

        def memory_in_use(self):
            return self.in_use, self.in_use

    platform, seen = Measured(), {}

    def note(module, name, rows):
        function = getattr(module, name)

        def noting(*args):
            platform.in_use = 10**8  # whatever that step takes
            seen[name] = max(seen.get(name, 0), rows(args))
            return function(*args)

        monkeypatch.setattr(module, name, noting)

    note(Penalties, "_penalize", lambda args: len(args[2]))
    note(sampler, "entries", lambda args: len(args[0]))
    note(logprobs, "entries", lambda args: len(args[0]))
    monkeypatch.setattr("quire.worker.startup.resolve.get_platform", lambda *args: platform)
    worker = _worker(checkpoint("qwen3"), max_num_batched_tokens=32)
    plan = worker.initialize(lambda phase, fraction: None).plan
    assert seen == {"_penalize": 4, "entries": 7} and 10**8 * 0.9 < plan.activations <= 10**8
    worker.shutdown()


def test_models_with_states_are_also_measured_with_long_prompts(checkpoint, monkeypatch, tmp_path):
    """Kernels of states keep something per chunk of a prompt, those of attention do not."""

    class Measured(CpuPlatform):
        measures_memory = True
        memory_in_use = staticmethod(lambda: (0, 10**8))

    seen, measure = [], measuring._measure
    monkeypatch.setattr(measuring, "_measure", lambda *args: seen.append(args[-1]) or measure(*args))
    monkeypatch.setattr("quire.worker.startup.resolve.get_platform", lambda *args: Measured())
    for folder, want in ((checkpoint("qwen3"), [[8] * 4]), (build_family("lfm2", tmp_path), [[8] * 4, [32]])):
        worker = _worker(folder, max_num_batched_tokens=32)
        worker.initialize(lambda phase, fraction: None)
        worker.shutdown()
        assert sorted(seen) == sorted(want)
        seen.clear()
