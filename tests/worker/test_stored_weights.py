"""Quantized checkpoints: the weights that a model loads from them are exactly those that the reference packages or the
formats' formulas say, whole and split over ranks; the native kernels give the same logits up to rounding.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from quire.worker.layers.linear import Linear
from quire.worker.layers.quantization.blocks import PlainBlocks
from quire.worker.layers.quantization.fp4 import mxfp4_blocks
from quire.worker.layers.quantization.int_groups import PlainGroups
from quire.worker.layers.quantization.packing import E2M1
from quire.worker.loader import load_weights
from quire.worker.models import build_model, parse_model_spec, read_model_spec, weight_bytes
from quire.worker.parallel import use_groups
from quire.worker.platforms.cpu import CpuPlatform
from tests.worker import quantized_checkpoints as make
from tests.worker.dense_attention import PagedRunner
from tests.worker.ranks import run_ranks, thread_groups

CPU = torch.device("cpu")
TEXT = list(range(4, 100))
SIZES = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2}
FORMATS = {
    "fp8 blocks": make.fp8(128),
    "fp8 small blocks": make.fp8(48),
    "fp8 tensor": make.fp8(None),
    "ct w4a16 groups": make.compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct w4a16 zeros": make.compressed_tensors(
        "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False
    ),
    "ct w4a16 group 16": make.compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=16),
    "ct w3 channel": make.compressed_tensors("pack-quantized", num_bits=3, strategy="channel"),
    "ct w8a16": make.compressed_tensors("pack-quantized", num_bits=8, strategy="channel"),
    "ct w8a8": make.compressed_tensors("int-quantized", num_bits=8, strategy="channel"),
    "ct w8 tensor": make.compressed_tensors("int-quantized", num_bits=8, strategy="tensor"),
    "ct w8 zeros": make.compressed_tensors("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "ct fp8 channel": make.compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct fp8 tensor": make.compressed_tensors("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct fp8 block": make.compressed_tensors(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 64]
    ),
    "ct nvfp4": make.compressed_tensors(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "ct mxfp4": make.compressed_tensors(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8"
    ),
    "awq": make.awq(32),
    "gptq 4": make.gptq(4, 32),
    "gptq 4 v2": make.gptq(4, 32, version=2),
    "gptq 4 act-order": make.gptq(4, 32, act_order=True),
    "gptq 4 group 96": make.gptq(4, 96),
    "gptq 2": make.gptq(2, 64),
    "gptq 3": make.gptq(3, 32),
    "gptq 5": make.gptq(5, 32),
    "gptq 8 act-order": make.gptq(8, 32, act_order=True, version=2),
    "modelopt nvfp4": make.modelopt_nvfp4(),
    "bnb int8": make.bitsandbytes(8),
    "bnb nf4": make.bitsandbytes(4),
    "bnb nf4 nested": make.bitsandbytes(4, nested=True),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    from tests.checkpoints import build_checkpoint

    made = {}

    def source(name: str) -> str:
        if name not in made:
            made[name] = build_checkpoint(name, tmp_path_factory.mktemp(name), **SIZES)
        return made[name]

    return source


def load(folder: Path, dtype: torch.dtype = torch.float32, ops=None):
    spec = read_model_spec(str(folder))
    model = build_model(spec, dtype, CPU, ops=ops)
    load_weights(model, spec, str(folder))
    return model


def logits_of(model, text: list[int] = TEXT) -> torch.Tensor:
    runner = PagedRunner(model, 1, len(text) + 16)
    with torch.inference_mode():
        chunks = [text[:-4], *([token] for token in text[-4:])]
        return torch.cat([model.logits(runner.step({0: chunk})[0]) for chunk in chunks])


def weight_of(layer: Linear) -> torch.Tensor:
    if isinstance(layer.method, PlainBlocks):
        return torch.cat([part.dequantized() for part in layer.method.parts])
    if not isinstance(layer.method, PlainGroups):
        return layer.weight
    order = layer.order
    weight = layer.method._weight(slice(None))
    return weight if order is None else weight[:, order.argsort()]


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_exact(sources, tmp_path, name):
    folder = Path(make.write(sources("qwen3"), tmp_path, *FORMATS[name]))
    model, plain = load(folder / "quantized"), load(folder / "plain")
    for (path, layer), expected in zip(model.named_modules(), plain.modules()):
        if isinstance(layer, Linear):
            assert torch.equal(weight_of(layer), expected.weight), path
    assert torch.allclose(logits_of(model), logits_of(plain), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "fp8 small blocks",
        "fp8 tensor",
        "ct w4a16 zeros",
        "ct w3 channel",
        "ct w8a8",
        "ct nvfp4",
        "ct mxfp4",
        "awq",
        "gptq 2",
        "gptq 3",
        "gptq 4 act-order",
        "bnb int8",
        "bnb nf4 nested",
    ],
)
def test_ranks_load_their_share(sources, tmp_path, name):
    """160 columns of down_proj per rank, and fused rows: blocks and words that straddle the ranks' borders."""
    folder = Path(make.write(sources("llama2"), tmp_path, *FORMATS[name]))
    expected, models = logits_of(load(folder / "plain")), []
    for group in thread_groups(2):
        with use_groups(tp=group):
            models.append(load(folder / "quantized"))
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "name", ["ct w4a16 zeros", "ct w8a8", "awq", "gptq 4 act-order", "gptq 3", "ct mxfp4", "fp8 blocks"]
)
def test_native_kernels_multiply_what_is_stored(sources, tmp_path, native_kernels, name):
    folder = Path(make.write(sources("llama-bias"), tmp_path, *FORMATS[name]))
    exact = logits_of(load(folder / "plain"))
    rounding = float((logits_of(load(folder / "plain", torch.bfloat16)) - exact).norm())
    native = load(folder / "quantized", torch.bfloat16, CpuPlatform().ops)
    assert float((logits_of(native) - exact).norm()) < 1.5 * rounding
    held = sum(t.nbytes for layer in native.modules() if isinstance(layer, Linear) for t in layer.buffers())
    spec = read_model_spec(str(folder / "quantized"))
    assert held < 1.5 * weight_bytes(spec, torch.bfloat16)


def test_layers_left_plain_may_be_fused_with_others(sources, tmp_path):
    config, store = FORMATS["ct w4a16 groups"]
    config = {**config, "ignore": ["lm_head", "re:.*layers\\.0\\.self_attn\\.k_proj", "model.layers.1.mlp.down_proj"]}

    def skip(name, weight):
        skipped = name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
        return ({}, weight) if skipped else store(name, weight)

    folder = Path(make.write(sources("qwen3"), tmp_path, config, skip))
    assert torch.allclose(logits_of(load(folder / "quantized")), logits_of(load(folder / "plain")), atol=1e-3)


def test_dynamic_overrides_of_gptq(sources, tmp_path):
    (_, four), (_, eight) = make.gptq(4, 64), make.gptq(8, 32)
    dynamic = {"-:.*layers\\.0\\.mlp\\.down_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 32}}
    config, _ = make.gptq(4, 64, dynamic=dynamic)

    def store(name, weight):
        if name.endswith("0.mlp.down_proj"):
            return {}, weight
        return (eight if name.endswith("down_proj") else four)(name, weight)

    folder = Path(make.write(sources("qwen3"), tmp_path, config, store))
    assert torch.allclose(logits_of(load(folder / "quantized")), logits_of(load(folder / "plain")), atol=1e-3)


def test_older_exports_of_modelopt(sources, tmp_path):
    config, store = FORMATS["fp8 tensor"]
    folder = Path(make.write(sources("qwen3"), tmp_path, config, store)) / "quantized"
    settings = json.loads((folder / "config.json").read_text())
    del settings["quantization_config"]
    (folder / "config.json").write_text(json.dumps(settings))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    assert torch.allclose(logits_of(load(folder)), logits_of(load(folder.parent / "plain")), atol=1e-3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported; supported: fp8, "),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"quant_method": "gptq", "bits": 9}, "bits 9 is not supported; supported: 2 to 8"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"damp": 1}}}, "dynamic 'damp' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit, load_in_8bit False is not supported"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format 'sparse-24-bitmask' is not supported",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "marlin-24",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {}}},
            },
            "format 'marlin-24' is not supported; supported: pack-quantized",
        ),
    ],
)
def test_unsupported_settings_are_named(sources, config, words):
    raw = json.loads(Path(sources("qwen3"), "config.json").read_text())
    spec = parse_model_spec({**raw, "quantization_config": config})
    with pytest.raises(ValueError, match=re.escape(words)):
        build_model(spec, torch.float32, torch.device("meta"))


def test_quantizing_again_is_refused(sources):
    raw = json.loads(Path(sources("qwen3"), "config.json").read_text())
    spec = parse_model_spec({**raw, "quantization_config": make.fp8(128)[0]})
    with pytest.raises(ValueError, match="--quantization int4: the weights are quantized already; omit it"):
        build_model(spec, torch.bfloat16, torch.device("meta"), quantization="int4")


def test_blocks_of_gpt_oss():
    blocks = torch.arange(32, dtype=torch.uint8).view(1, 2, 16) * 8 + 5
    exponents = torch.tensor([[127, 120]], dtype=torch.uint8)
    values = [*E2M1, *(-value for value in E2M1)]
    expected = [
        values[code] * 2.0 ** (int(e) - 127)
        for row, e in zip(blocks[0], exponents[0])
        for byte in row.tolist()
        for code in (byte & 15, byte >> 4)
    ]
    assert mxfp4_blocks(blocks, exponents).flatten().tolist() == expected
