"""The whole GPU path under Triton's interpreter: its kernels in every layer, its attention and sampler, recorded steps,
two steps in flight.
"""

from types import SimpleNamespace

import pytest
import torch

from quire.engine.messages import SamplingParams
from quire.worker.cache import allocation as kv_cache
from quire.worker.cache.storage import KVStorage
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cuda.install import TritonOps
from quire.worker.cuda.kernels import triton_ops
from quire.worker.cuda.triton_backend import TritonPagedBackend
from quire.worker.layers.attention import Attention
from quire.worker.spec.cache import plan_cache
from tests.helpers.in_process import InProcessEngine
from tests.helpers.worker.interpreter import needs_loops
from tests.worker.cuda.test_cuda_graph import Recorder
from tests.worker.models.test_moe_models import mxfp4_checkpoints

pytestmark = [
    needs_loops,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the real path is tested, in test_gpu.py"),
]

SETTINGS = dict(block_size=4, num_gpu_blocks_override=60, max_num_batched_tokens=16, max_num_seqs=3, max_model_len="60")


@pytest.fixture
def folder_of(checkpoint, tmp_path):
    def find(name: str) -> str:
        if name != "gpt-oss in MXFP4":
            return checkpoint(name)
        return mxfp4_checkpoints(checkpoint("gpt-oss", intermediate_size=64, num_hidden_layers=2), tmp_path)[1]

    return find


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt-oss in MXFP4"])
def test_tokens_are_those_of_torch(name, folder_of, monkeypatch):
    folder = folder_of(name)
    prompts = [[7, 8, 9], [(5 * i) % 480 + 4 for i in range(21)], [11], [30, 31]]
    sampling = [
        SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=4, temperature=0.8, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.9, top_p=0.8, seed=4, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    ]
    plain = InProcessEngine(folder, attention_backend="cpu_paged", **SETTINGS)
    plain.executor._worker.runner.model.finalize()
    want = plain.generate(prompts, sampling)
    plain.close()

    monkeypatch.setattr(CpuPlatform, "ops", TritonOps())
    engine = InProcessEngine(folder, steps_in_flight=2, attention_backend="cpu_paged", **SETTINGS)
    runner = engine.executor._worker.runner
    assert runner.model.model.layers["0"].self_attn.qk_norm_rope_write is triton_ops.qk_norm_rope_write
    runner.backend = TritonPagedBackend()
    recorder = Recorder(runner.model)
    runner.use_graphs(60, recorder)
    runner.forward.forward = recorder.forward
    while runner.work_idle():
        pass
    recorder.num_replays = 0
    got = engine.generate(prompts, sampling)
    engine.close()
    assert [result.token_ids for result in got] == [result.token_ids for result in want] and recorder.num_replays > 1
    for a, b in zip(got[2].logprobs, want[2].logprobs):
        assert a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_the_kv_cache_of_a_gpu_begins_as_zeros(monkeypatch):
    """A kernel that loads whole pages reads slots that no request has written: reused memory may hold NaN, and NaN
    times 0 is NaN.
    """

    class Memory:
        """torch on a device whose memory was used before."""

        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *shape, dtype, device):
            return torch.full(shape, float("nan"), dtype=dtype)

        def zeros(self, *shape, dtype, device):
            return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(kv_cache, "torch", Memory())
    layers = [Attention(2, 2, 4, i) for i in range(2)]
    plan = plan_cache([layer.cache_spec(2) for layer in layers])
    kv_cache.allocate(layers, plan, 5, 8, KVStorage(torch.bfloat16), SimpleNamespace(device="cuda", shares_ram=False))
    for cache in (cache for layer in layers for cache in (layer.k_cache, layer.v_cache)):
        assert cache.shape == (5, 8, 2, 4) and not cache.any()
