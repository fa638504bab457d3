"""How many launches a decode step takes on a GPU, by family and batch: each costs the host and the device some
microseconds.
"""

import pytest
import torch

from tests.helpers.gpu import has_gpu

pytest.importorskip("triton")
if has_gpu():  # what it imports selects the interpreter for all tests of this process
    pytest.skip("counts calls under Triton's interpreter", allow_module_level=True)
from benchmarks import step_model
from quire.worker.cuda.kernels import triton_ops, triton_paged
from quire.worker.messages import SamplingParams
from tests.helpers.models.checkpoints import config_of
from tests.helpers.worker.launches import Launches, count, per_layer

MIXED = SamplingParams(temperature=0.7, top_p=0.9, seed=1)
GREEDY = SamplingParams(temperature=0.0)
OUTSIDE = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, batch, sampling, layer",
    [
        ("llama3", 1, MIXED, 10),
        ("llama3", 64, MIXED, 10),
        ("llama3", 7, GREEDY, 10),  # padded to 8
        ("qwen3", 8, MIXED, 10),
        ("qwen3-moe", 1, MIXED, 12),
        ("qwen3-moe", 64, MIXED, 12),
        ("gpt-oss", 8, MIXED, 12),
    ],
)
def test_a_decode_step_takes_few_launches(name, batch, sampling, layer):
    step, of_layer = per_layer(name, batch, sampling)
    assert step.outside["graph"] == 1 and step.outside["_fill_kernel"] == 1, step.outside
    assert step.outside.total() <= OUTSIDE, step.outside
    assert of_layer["linear"] + of_layer["mv"] >= 3 and of_layer.total() <= layer, of_layer
    predicted = step_model.DENSE_LAYER if layer == 10 else step_model.EXPERTS_LAYER
    assert of_layer.total() == predicted
    assert step.outside.total() <= step_model.OUTSIDE + (sampling is MIXED)  # a filter takes one more
    # what is not in layers: the embedding, and the last norm
    assert step.inside.total() - 3 * of_layer.total() <= 3, step.inside


# launches of a step of seven requests outside the graph beyond those of its inputs, graph, head and tokens to the host:
# one samples and stores the tokens
KINDS = [
    ({}, 1),
    ({"temperature": 0.7, "seed": 1}, 1),
    ({"temperature": 0.7, "seed": 1, "top_p": 0.9, "top_k": 20}, 2),
    ({"temperature": 0.7, "seed": 1, "min_p": 0.1}, 2),
    ({"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}, 4),  # float32, a copy, a kernel
    ({"repetition_penalty": 1.1, "repeat_last_n": 8}, 4),
    ({"logprobs": 0}, 4),  # float32, a kernel, a copy to the host
    ({"logprobs": 5}, 5),  # and the largest
    ({"logit_bias": {3: 1.0}}, 3),
    ({"min_tokens": 30, "stop_token_ids": [3, 4]}, 3),
]


@pytest.mark.parametrize("parameters, more", KINDS, ids=lambda x: "-".join(x) if isinstance(x, dict) else str(x))
def test_what_a_request_asks_of_logits_takes_few_launches(parameters, more):
    step = count("llama3", 7, 1, SamplingParams(**{"temperature": 0.0} | parameters))
    assert step.outside.total() <= 6 + more, step.outside


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_split_keys_take_no_second_launch(name, monkeypatch):
    monkeypatch.setattr(triton_paged, "default_num_splits", lambda *sizes: 8)
    triton_paged._plan.cache_clear()
    step = count(name, 1, 2, GREEDY)
    triton_paged._plan.cache_clear()
    assert step.inside["_attend_kernel"] == 2 and not step.inside["_combine_kernel"], step.inside


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("on_tensor_cores", [False, True])
def test_blocks_of_fp8_take_as_many_as_plain_weights(batch, on_tensor_cores, monkeypatch):
    """What feeds a product rounds for it, but for attention."""
    from quire.worker.cuda import install

    kernels = install.TritonOps()
    kernels._multiplies_floats8 = on_tensor_cores
    monkeypatch.setattr("tests.helpers.worker.launches.TritonOps", lambda: kernels)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "quantization_config": FP8}
    smaller = "tests.helpers.worker.launches.config_of"
    monkeypatch.setattr(smaller, lambda name, **more: config_of(name, **sizes, **more))
    step, of_layer = per_layer("llama3", batch, MIXED)
    assert step.outside.total() <= OUTSIDE, step.outside
    assert of_layer.total() <= step_model.DENSE_LAYER + (on_tensor_cores and batch > 1), of_layer


def test_logits_are_float32_where_something_computes_with_them():
    plain, penalized = (
        count("qwen3", 4, 1, SamplingParams(temperature=0.7, seed=1, presence_penalty=penalty)) for penalty in (0, 0.5)
    )
    assert plain.outside["to"] == 0 and penalized.outside["to"] >= 1
    assert 0 < plain.outside["linear"] == penalized.outside["linear"]


def test_a_plain_step_takes_many(monkeypatch):
    """The count sees the operations that the kernels replace."""
    from quire.worker.cuda import install
    from quire.worker.platforms.ops import Ops

    kernels = install.TritonOps()
    kernels.fill_inputs, kernels.route = Ops().fill_inputs, Ops().route
    monkeypatch.setattr("tests.helpers.worker.launches.TritonOps", lambda: kernels)
    launches = count("qwen3-moe", 7, 1, MIXED)
    assert launches.outside.total() > 2 * OUTSIDE, launches.outside
    assert launches.inside["softmax"] == launches.inside["topk"] == 1, launches.inside


def test_what_is_a_launch():
    launches, x = Launches(), torch.ones(4, 6)
    with launches.counting(), torch.inference_mode():
        x.view(6, 4).T[1:].unbind()
        x.float().contiguous().reshape(24)
        filled = torch.empty(3).any()
        x.add_(1)
        x.bfloat16()
        x.T.contiguous()
        triton_ops.silu_and_mul(x)
    assert not filled
    assert launches.outside == {"any": 1, "add_": 1, "to": 1, "contiguous": 1, "_silu_and_mul_kernel": 1}
