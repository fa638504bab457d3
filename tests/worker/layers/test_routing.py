"""The routing formulas against the routers of transformers, with weights and correction biases that matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.worker.cpu import ops as cpu_ops
from quire.worker.layers.routing import route
from quire.worker.spec.moe import RoutingSpec

E, K, HIDDEN, TOKENS = 8, 3, 32, 200
SIZES = {"hidden_size": HIDDEN, "num_experts": E, "num_local_experts": E, "n_routed_experts": E, "moe_num_experts": E}
COUNTS = {"num_experts_per_tok": K, "moe_topk": K, "moe_k": K, "top_k_experts": K}
NORMALIZED = RoutingSpec(E, K, weights="normalized")
SIGMOID = replace(NORMALIZED, scores="sigmoid", correction=True, epsilon=1e-20, group_best=2, scale=1.7)

CASES = {
    "mixtral.MixtralTopKRouter": (NORMALIZED, {}),
    "qwen2_moe.Qwen2MoeTopKRouter": (RoutingSpec(E, K), {"norm_topk_prob": False}),
    "qwen3_moe.Qwen3MoeTopKRouter": (NORMALIZED, {"norm_topk_prob": True}),
    "olmoe.OlmoeTopKRouter": (RoutingSpec(E, K), {"norm_topk_prob": False}),
    "gpt_oss.GptOssTopKRouter": (RoutingSpec(E, K, "logits", "softmax", bias=True), {}),
    "granitemoe.GraniteMoeTopKRouter": (RoutingSpec(E, K, "logits", "softmax"), {}),
    "deepseek_v2.DeepseekV2TopkRouter": (
        RoutingSpec(E, K, scale=2.5, num_groups=4, top_groups=2),
        {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5},
    ),
    "deepseek_v3.DeepseekV3TopkRouter": (
        replace(SIGMOID, num_groups=4, top_groups=2),
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True},
    ),
    "glm4_moe.Glm4MoeTopkRouter": (
        SIGMOID,
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True},
    ),
    "minimax_m2.MiniMaxM2TopKRouter": (replace(SIGMOID, scale=1.0, epsilon=0.0), {}),
    "ernie4_5_moe.Ernie4_5_MoeTopKRouter": (replace(NORMALIZED, correction=True, epsilon=1e-12), {}),
    "hunyuan_v1_moe.HunYuanMoEV1Gate": (NORMALIZED, {}),
}


def build(name: str, settings: dict):
    from importlib import import_module

    from transformers import CONFIG_MAPPING

    module_name, cls = name.split(".")
    module = import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    config_class = CONFIG_MAPPING[module_name]
    known = {key: value for key, value in (SIZES | COUNTS).items() if hasattr(config_class(), key)}
    extra = (0,) if cls == "HunYuanMoEV1Gate" else ()
    return getattr(module, cls)(config_class(**known | settings), *extra)


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    spec, settings = CASES[name]
    router, generator = build(name, settings), torch.Generator().manual_seed(3)
    for tensor in router.parameters():
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() > 1 else 0.5))
    correction = torch.randn(E, generator=generator) * 0.2 if spec.correction else None
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    args = (x,)
    if "MiniMax" in name:
        args = x, correction
    elif "Ernie" in name:
        router.moe_statics.e_score_correction_bias.data.copy_(correction)
    elif correction is not None:
        router.e_score_correction_bias.copy_(correction)
    with torch.no_grad():
        _, want, want_ids = router(*args)
        linear = router.wg if hasattr(router, "wg") else router
        logits = torch.nn.functional.linear(x, linear.weight)
        got, ids = route(spec, logits, correction, router.bias if spec.bias else None)
    order, want_order = ids.argsort(-1), want_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), want_ids.gather(-1, want_order))
    torch.testing.assert_close(got.gather(-1, order), want.gather(-1, want_order), atol=1e-6, rtol=1e-5)
    if correction is not None:  # the comparison would see biases that are left out
        assert not torch.equal(route(replace(spec), logits)[1].sort(-1).values, want_ids.sort(-1).values)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 200])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "logits"])
@pytest.mark.parametrize("weights", ["scores", "normalized", "softmax", "sigmoid"])
@pytest.mark.parametrize("sizes", [(8, 3), (128, 8), (60, 1)])
def test_native_equals_torch(native_kernels, sizes, weights, scores, tokens):
    spec = RoutingSpec(*sizes, scores, weights, scale=1.5, epsilon=0.1)
    torch.manual_seed(1)
    logits, biases = 3 * torch.randn(tokens, sizes[0]), torch.randn(2, sizes[0])
    for correction in (None, biases[0]):
        for bias in (None, biases[1]):
            want, want_ids = route(spec, logits, correction, bias)
            got, ids = cpu_ops.route(spec, logits, correction, bias)
            same = (ids == want_ids).all(-1)
            assert same.float().mean() > 0.98  # in other rows, scores are equal but for rounding
            torch.testing.assert_close(got[same], want[same], atol=1e-6, rtol=1e-5)


def test_native_choice_among_equals_and_numbers_that_are_none(native_kernels):
    """The first of equals, and experts that exist whatever the logits are."""
    logits = torch.zeros(2, 8)
    logits[1] = float("nan")
    weights, ids = cpu_ops.route(RoutingSpec(8, 3), logits)
    assert ids[0].tolist() == [0, 1, 2] and weights[1].isnan().all()
    assert ((ids >= 0) & (ids < 8)).all()


def test_llama4_weights_are_sigmoids_of_the_chosen_logits():
    logits = torch.randn(TOKENS, E)
    weights, ids = route(RoutingSpec(E, 1, "logits", "sigmoid"), logits)
    assert torch.equal(ids[:, 0], logits.argmax(-1))
    torch.testing.assert_close(weights[:, 0], logits.amax(-1).sigmoid())


def test_groups_bound_the_choice():
    spec = RoutingSpec(E, K, "sigmoid", num_groups=4, top_groups=2, group_best=2)
    _, ids = route(spec, torch.randn(TOKENS, E))
    assert max(len(set(row)) for row in (ids // 2).tolist()) <= 2
