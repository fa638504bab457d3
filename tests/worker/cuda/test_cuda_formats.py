"""Quantized checkpoints of the Hub as a GPU holds and multiplies them, with the Triton kernels under the interpreter:
every format keeps its weights, in the memory that is planned for it, whole and split over ranks, dense and in experts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from quire.worker.cuda.install import TritonOps
from quire.worker.cuda.quantized import TritonGroups
from quire.worker.layers.linear import Linear
from quire.worker.layers.moe import ListedExperts, pack_experts, run_experts
from quire.worker.layers.quantization.int_groups import Reordered
from quire.worker.models.registry import read_model_spec, weight_bytes
from quire.worker.parallel import Group, use_groups
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.worker import quantized_checkpoints as make
from tests.helpers.worker.ranks import thread_groups
from tests.worker.layers.test_stored_experts import MODELS
from tests.worker.layers.test_stored_weights import FORMATS, SIZES, load
from tests.worker.models.test_moe_models import mxfp4_checkpoints

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="uses the interpreter")

# bits of a projection's weights in 128 columns, with their scales
BITS = {
    "fp8 blocks": 8.25,
    "fp8 small blocks": 8 + 3 * 32 / 128,
    "fp8 tensor": 8.25,
    "ct w4a16 groups": 4.5,
    "ct w4a16 zeros": 5,
    "ct w4a16 group 16": 5,
    "ct w3 channel": 4.125,
    "ct w8a16": 8.125,
    "ct w8a8": 8.125,
    "ct w8 tensor": 8.25,
    "ct w8 zeros": 8.25,
    "ct fp8 channel": 8.25,
    "ct fp8 tensor": 8.25,
    "ct fp8 block": 8.5,
    "ct nvfp4": 4.75,
    "ct mxfp4": 4.25,
    "awq": 5,
    "gptq 4": 5,
    "gptq 4 v2": 5,
    "gptq 4 act-order": 5,
    "gptq 4 group 96": 4.5,
    "gptq 2": 4.5,
    "gptq 3": 5,
    "gptq 5": 9,
    "gptq 8 act-order": 9,
    "modelopt nvfp4": 4.75,
    "bnb int8": 8.25,
    "ct mxfp8": 9,
    "ct w4a16 act-order": 4.5,
    "gptq 6": 8.5,
    "gptq 7": 9,
    "modelopt fp8 blocks": 8.25,
    "fbgemm fp8": 8.25,
    "fp8 e8m0": 8.25,
    "auto-round gptq": 5,
    "auto-round gptq 3": 5,
    "auto-round gptqmodel": 5,
    "auto-round 2": 4.5,
    "auto-round awq": 5,
    "quark fp8 tensor": 8.25,
    "quark fp8 channel": 8.25,
    "quark int8": 8.125,
    "quark mxfp4": 4.25,
    "quark int4": 4.5,
    "quark uint4": 5,
    "quark uint4 in order": 5,
    "bnb fp4": 4.5,
    "bnb nf4": 4.5,
    "bnb nf4 nested": 4.5,
}
# one for each form in which numbers are stored
FAST = (
    "fp8 blocks",
    "ct w4a16 zeros",
    "ct w8a8",
    "ct fp8 channel",
    "ct nvfp4",
    "ct mxfp4",
    "gptq 4 act-order",
    "bnb nf4",
)
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made: dict[str, str] = {}

    def source(name: str, **sizes) -> str:
        if name not in made:
            made[name] = build_checkpoint(name, tmp_path_factory.mktemp(name), **sizes)
        return made[name]

    return source


def weight_of(layer: Linear) -> torch.Tensor:
    method = layer.method.method if isinstance(layer.method, Reordered) else layer.method
    if not isinstance(method, TritonGroups):
        return layer.weight
    weight = method.rows(torch.arange(layer.out_features))
    return weight[:, layer.order.argsort()] if isinstance(layer.method, Reordered) else weight


def held(model: torch.nn.Module) -> int:
    """Bytes of the weights."""
    buffers = [t for layer in model.modules() if isinstance(layer, Linear) for t in layer.buffers(recurse=False)]
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *buffers)}.values())


def check_layers(stored: torch.nn.Module, plain: torch.nn.Module) -> int:
    """Compare weights, and products where the interpreter is fast; return the number of layers that the kernels
    multiply.
    """
    count = 0
    for (path, layer), expected in zip(stored.named_modules(), plain.modules()):
        if not isinstance(layer, Linear):
            continue
        torch.testing.assert_close(weight_of(layer), expected.weight, rtol=2e-7, atol=0, msg=path)
        count += layer.weight is None
        if layer.weight is None and path.endswith(("qkv_proj", "down_proj")):
            x = torch.randn(2, layer.in_features, generator=torch.Generator().manual_seed(count))
            found = layer.method.apply(layer, x)
            torch.testing.assert_close(found, expected.method.apply(expected, x), atol=1e-4, rtol=1e-4, msg=path)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_dense_layers(sources, tmp_path, name):
    folder = Path(make.write(sources("qwen3", **SIZES | {"num_hidden_layers": 1}), tmp_path, *FORMATS[name]))
    model = load(folder / "quantized", ops=TritonOps())
    assert check_layers(model, load(folder / "plain")) == 4
    layer = model.model.layers["0"].mlp.gate_up_proj
    order = layer.order.nbytes if isinstance(layer.method, Reordered) else 0
    assert layer.method.num_bytes(layer) - order == BITS[name] * layer.out_features * layer.in_features / 8
    spec = read_model_spec(str(folder / "quantized"))
    planned = weight_bytes(spec, torch.float32, ops=TritonOps())
    assert held(model) == pytest.approx(planned, rel=0.01)


# down_proj has 160 columns per rank: groups of 48 and 64 columns straddle the border, and are dequantized on one side
SPLIT = ["fp8 small blocks", "ct w4a16 zeros", "ct w3 channel", "ct nvfp4", "ct mxfp4", "awq", "gptq 4 act-order"]
SPLIT += ["modelopt nvfp4", "bnb int8", "bnb nf4 nested"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_ranks_multiply_their_share(sources, tmp_path, name):
    folder = Path(make.write(sources("llama2", **SIZES | {"num_hidden_layers": 1}), tmp_path, *FORMATS[name]))
    plain, found = load(folder / "plain").model.layers["0"].mlp, []
    x = torch.randn(2, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    between = torch.randn(2, SIZES["intermediate_size"], generator=torch.Generator().manual_seed(1))
    for group in thread_groups(2):
        with use_groups(tp=group):
            mlp = load(folder / "quantized", ops=TritonOps()).model.layers["0"].mlp
        up, down = mlp.gate_up_proj, mlp.down_proj
        share = between[:, group.rank * down.in_features :][:, : down.in_features]
        found.append((up.method.apply(up, x).chunk(2, 1), down.method.apply(down, share)))
    whole = torch.cat([up[side] for side in range(2) for up, _ in found], 1)
    expected = plain.gate_up_proj.method.apply(plain.gate_up_proj, x)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    total = sum(down for _, down in found)
    expected = plain.down_proj.method.apply(plain.down_proj, between)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


def routed(num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of 128 columns, weights and experts of three tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(3, num_experts, generator=generator).topk(2).indices
    return torch.randn(3, 128, generator=generator), torch.rand(3, 2, generator=generator), ids


def reference(experts: ListedExperts, x, weights, ids) -> torch.Tensor:
    return run_experts(x, weights, ids, {int(i): expert for i, expert in experts.experts.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_experts(sources, tmp_path, name):
    """Every format's experts are one call, in the planned memory."""
    folder = Path(
        make.write(sources("qwen3-moe", **MODELS["qwen3-moe"] | {"num_hidden_layers": 1}), tmp_path, *FORMATS[name])
    )
    stored, plain = load(folder / "quantized", ops=TritonOps()), load(folder / "plain")
    assert pack_experts(stored)
    found, expected = (model.model.layers["0"].mlp.experts for model in (stored, plain))
    args = routed(4)
    torch.testing.assert_close(found(*args), reference(expected, *args), atol=1e-4, rtol=1e-4)
    planned = weight_bytes(read_model_spec(str(folder / "quantized")), torch.float32, ops=TritonOps())
    assert held(stored) == pytest.approx(planned, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", ["fp8 small blocks", "ct nvfp4", "ct mxfp4", "awq", "gptq 4 act-order", "bnb nf4"])
def test_ranks_have_their_share_of_the_experts(sources, tmp_path, name, expert_parallel):
    """The sum over the ranks is the result. Some of these formats' groups straddle the border of 64 columns."""
    folder = Path(
        make.write(sources("qwen3-moe", **MODELS["qwen3-moe"] | {"num_hidden_layers": 1}), tmp_path, *FORMATS[name])
    )
    args, total = routed(4), 0
    for group in thread_groups(2):
        with use_groups(tp=group, ep=group if expert_parallel else Group()):
            model = load(folder / "quantized", ops=TritonOps())
        assert pack_experts(model)
        total = total + model.model.layers["0"].mlp.experts(*args)
    expected = reference(load(folder / "plain").model.layers["0"].mlp.experts, *args)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_experts_that_differ_in_form_are_multiplied_one_by_one(sources, tmp_path):
    config, store = FORMATS["ct nvfp4"]
    left = "model.layers.0.mlp.experts.1.down_proj"
    skip = lambda name, weight: ({}, weight) if name == left else store(name, weight)  # noqa: E731
    source = sources("qwen3-moe", **MODELS["qwen3-moe"] | {"num_hidden_layers": 1})
    folder = Path(make.write(source, tmp_path, {**config, "ignore": ["lm_head", left]}, skip))
    stored, plain = load(folder / "quantized", ops=TritonOps()), load(folder / "plain")
    assert not pack_experts(stored)
    found, expected = (model.model.layers["0"].mlp.experts for model in (stored, plain))
    args = routed(4)
    torch.testing.assert_close(found(*args), reference(expected, *args), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one", "tensor parallel", "expert parallel"])
def test_gpt_oss(tmp_path, ranks):
    """MXFP4 as in its checkpoints, with its biases and clamped activation: 4.25 bits."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    folder = build_checkpoint("gpt-oss", tmp_path / "made", **sizes)
    plain, quantized = mxfp4_checkpoints(folder, tmp_path)
    expected = load(plain).model.layers["0"].mlp.experts
    num, total = len(expected.experts), 0
    for group in [Group()] if ranks == "one" else thread_groups(2):
        with use_groups(tp=group, ep=group if ranks == "expert parallel" else Group()):
            model = load(quantized, ops=TritonOps())
        assert pack_experts(model)
        experts = model.model.layers["0"].mlp.experts
        total = total + experts(*routed(num))
        for layer in (layer for one in experts.experts.values() for layer in (one.gate_up_proj, one.down_proj)):
            bias = 0 if layer.bias is None else layer.bias.nbytes
            assert layer.method.num_bytes(layer) - bias == 4.25 / 8 * layer.in_features * layer.out_features
    torch.testing.assert_close(total, reference(expected, *routed(num)), atol=1e-4, rtol=1e-4)
    if ranks == "one":
        planned = weight_bytes(read_model_spec(quantized), torch.float32, ops=TritonOps())
        assert held(model) == planned
