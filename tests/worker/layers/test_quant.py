"""Weights of 8 and 4 bits: the torch twin against the native kernels, and both against bfloat16, in whole models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from quire.configs.config import Config
from quire.configs.sources import embedded_model
from quire.worker import estimates
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.native import KERNELS
from quire.worker.cpu.native_linear import QuantizedLinear
from quire.worker.cpu.packed_linear import NativeQuantMethod
from quire.worker.layers.linear import Linear
from quire.worker.layers.quantization import int_at_load as quant
from quire.worker.layers.quantization import int_groups
from quire.worker.limits import resolve_limits
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.parallel import use_groups
from quire.worker.startup.preview import preview
from quire.worker.weights.loader import load_weights
from quire.worker.worker import Worker
from tests.helpers.worker.dense_attention import PagedRunner
from tests.helpers.worker.ranks import run_ranks, thread_groups

CPU = torch.device("cpu")
TEXT = list(range(4, 150))
NAMES = ["llama-bias", "llama-tied", "qwen3"]  # biases; head and embedding in one; norms of heads


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(KERNELS, "lib", None)


def load(folder: str, quantization: str | None, **options):
    spec = read_model_spec(folder)
    model = build_model(spec, torch.bfloat16, CPU, quantization=quantization, ops=CpuPlatform().ops)
    load_weights(model, spec, folder, **options)
    return model


def logits_of(model, text: list[int] = TEXT) -> torch.Tensor:
    """Of a long chunk, which the native kernels multiply in bfloat16, then of short ones, which they multiply as
    integers.
    """
    runner = PagedRunner(model, 1, len(text) + 16)
    chunks = [text[:-30], text[-30:-8], text[-8:-4], *([token] for token in text[-4:])]
    with torch.inference_mode():
        return torch.cat([model.logits(runner.step({0: chunk})[0]) for chunk in chunks])


def tensors(model) -> int:
    return sum(tensor.nbytes for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values())


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 64), (70, 200), (16, 1000)])
def test_both_quantizers_choose_the_same_numbers(native_kernels, bits, n, k):
    torch.manual_seed(n)
    weight = (torch.randn(n, k) * torch.rand(n, 1)).bfloat16()
    weight[n // 2] = 0
    values, scales = quant.quantize(weight, bits)
    assert values.shape == (n, -(-k // quant.GROUPS[bits]) * quant.GROUPS[bits]) and not values[:, k:].any()
    widened = (values.view(*scales.shape, quant.GROUPS[bits]).float() * scales.float()[..., None]).flatten(1)[:, :k]
    native = QuantizedLinear.quantize(weight, bits, quant.GROUPS[bits]).rows(torch.arange(n))
    assert torch.equal(widened.bfloat16(), native)
    if k >= quant.GROUPS[bits]:
        assert error(widened, weight.float()) < {8: 0.008, 4: 0.1}[bits]
    if bits == 4:
        packed = int_groups.pack_int4(values)
        assert packed.nbytes == values.numel() // 2 and torch.equal(int_groups.unpack_int4(packed), values)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_models(checkpoint, native_kernels, exact_activations, monkeypatch, name, quantization):
    folder = checkpoint(name, dtype="bfloat16")
    exact, native = logits_of(load(folder, None)), load(folder, quantization)
    from_native = logits_of(native)
    lib = KERNELS.lib
    monkeypatch.setattr(KERNELS, "lib", None)
    twin = load(folder, quantization)
    from_twin = logits_of(twin)
    rounding = error(logits_of(load(folder, None)), exact)  # of bfloat16, the same product summed in another order
    assert error(from_native, from_twin) < 3 * rounding
    # random layers amplify what goes wrong before them
    assert 0.5 * rounding < error(from_native, exact) < {"int8": 0.05, "int4": 0.55}[quantization]
    size = tensors(twin)
    monkeypatch.setattr(KERNELS, "lib", lib)  # they have been compiled meanwhile
    twin.use(CpuPlatform().ops)
    twin.finalize()
    assert (
        torch.equal(logits_of(twin), from_native) and tensors(twin) == tensors(native) and tensors(native) < 1.3 * size
    )
    twin.finalize()
    assert torch.equal(logits_of(twin), from_native)


@pytest.mark.parametrize(
    ("setting", "int8", "int4"), [("auto", {False}, {True, False}), ("8", {True}, {True}), ("16", {False}, {False})]
)
def test_precision_of_activations(checkpoint, native_kernels, monkeypatch, setting, int8, int4):
    """By default 8 bits for weights of 4 bits, 16 for the others: int8, and the head of int4."""
    monkeypatch.setattr(KERNELS, "activation_bits", None)
    CpuPlatform().start(1, 1, cpu_activation_bits=setting)
    for quantization, expected in (("int8", int8), ("int4", int4)):
        model = load(checkpoint("qwen3", dtype="bfloat16"), quantization)
        methods = [layer.method for layer in model.modules() if isinstance(layer, Linear)]
        assert {method.linear.narrow for method in methods if isinstance(method, NativeQuantMethod)} == expected


def test_the_head_is_8_bits_and_the_embedding_readable(checkpoint, native_kernels):
    tied = load(checkpoint("llama-tied", dtype="bfloat16"), "int4")
    original = load(checkpoint("llama-tied", dtype="bfloat16"), None).model.embed_tokens
    ids = torch.arange(4, 500)
    assert error(tied.model.embed_tokens(ids).float(), original(ids).float()) < 0.008
    assert load(checkpoint("qwen3", dtype="bfloat16"), "int4").model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_ranks_quantize_what_they_hold(checkpoint, native_kernels, exact_activations, quantization):
    folder = checkpoint("llama-tied", dtype="bfloat16")  # 160 columns of down_proj over two ranks: groups of their own
    exact, alone = logits_of(load(folder, None)), logits_of(load(folder, quantization))
    models = []
    for group in thread_groups(2):
        with use_groups(tp=group):
            models.append(load(folder, quantization))
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        assert error(logits, exact) < 1.3 * error(alone, exact)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_the_memory_plan_is_true(checkpoint, native_kernels, name, quantization):
    folder = checkpoint(name, dtype="float16", intermediate_size=192)  # no padding
    config = Config.from_flat(
        model=folder,
        device="cpu",
        quantization=quantization,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len="64",
        num_gpu_blocks_override=20,
    )
    planned = preview(config)
    choices = {setting: (value, reason) for setting, value, reason in planned.choices}
    assert choices["dtype"] == ("bfloat16", f"required by --quantization {quantization}")
    ready = Worker(config).initialize(lambda phase, fraction: None)
    tables = 2048 * 32 * 4  # rotary
    assert ready.plan.weights - tables < 1.02 * planned.plan.weights < 1.04 * ready.plan.weights
    assert planned.plan.weights < {"int8": 0.75, "int4": 0.65}[quantization] * estimates.estimate_weights(
        read_model_spec(folder), torch.bfloat16, 1
    )


def test_quantizing_at_load_needs_bfloat16(checkpoint):
    folder = checkpoint("qwen3")
    words = "--quantization int8 supports bfloat16 activations only: omit --dtype float32"
    with pytest.raises(ValueError, match=re.escape(words)):
        config = Config.from_flat(model=folder, quantization="int8", dtype="float32")
        resolve_limits(config, read_model_spec(folder), CpuPlatform())


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "most"), [("int8", 1.01), ("int4", 1.10)])
def test_perplexity_of_a_trained_model(native_kernels, quantization, most):
    """Perplexity of the assistant's words in conversations that the model was not trained on."""
    folder = embedded_model()
    if folder is None:
        pytest.skip("the embedded model has no weights in this tree")
    from tokenizers import Tokenizer

    from tests.helpers.models.tiny_conversations import tiny_conversations

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    longest = json.loads((Path(folder) / "config.json").read_text())["max_position_embeddings"]
    texts = tiny_conversations(tokenizer)

    def perplexity(model) -> float:
        surprise, count = 0.0, 0
        for ids, by_assistant in texts:
            ids = ids[:longest]
            with torch.inference_mode():
                logprobs = model.logits(PagedRunner(model, 1, len(ids)).step({0: ids})[0]).log_softmax(-1)
            learnt = torch.tensor(by_assistant[1 : len(ids)])
            surprise -= float(logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[learnt].sum())
            count += int(learnt.sum())
        return float(torch.tensor(surprise / count).exp())

    assert perplexity(load(folder, quantization)) <= most * perplexity(load(folder, None))
