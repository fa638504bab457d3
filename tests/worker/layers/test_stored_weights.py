"""Quantized checkpoints: the weights that a model loads from them are exactly those that the reference packages or the
formats' formulas say, whole and split over ranks; the native kernels give the same logits up to rounding.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers.utils.quantization_config import QuantizationMethod

from quire.worker.cpu.device import CpuPlatform
from quire.worker.layers.linear import Linear
from quire.worker.layers.quantization.blocks import PlainBlocks
from quire.worker.layers.quantization.fp4 import mxfp4_blocks
from quire.worker.layers.quantization.int_groups import PlainGroups
from quire.worker.layers.quantization.kv_scales import declared, read_scales
from quire.worker.layers.quantization.packing import E2M1
from quire.worker.models.registry import build_model, parse_model_spec, read_model_spec, weight_bytes
from quire.worker.parallel import use_groups
from quire.worker.weights.loader import load_weights
from tests.helpers.worker import quantized_checkpoints as make
from tests.helpers.worker.dense_attention import PagedRunner
from tests.helpers.worker.ranks import run_ranks, thread_groups

CPU = torch.device("cpu")
TEXT = list(range(4, 100))
CT_FP8 = {"num_bits": 8, "type": "float"}
QUARK_FP8 = {"dtype": "fp8_e4m3", "is_dynamic": False, "symmetric": True}
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
    "ct mxfp8": make.compressed_tensors(
        "mxfp8-quantized", **CT_FP8, strategy="group", group_size=32, scale_dtype="torch.uint8"
    ),
    "ct w4a16 act-order": make.by_activation(32),
    "awq": make.awq(32),
    "gptq 4": make.gptq(4, 32),
    "gptq 4 v2": make.gptq(4, 32, version=2),
    "gptq 4 act-order": make.gptq(4, 32, act_order=True),
    "gptq 4 group 96": make.gptq(4, 96),
    "gptq 2": make.gptq(2, 64),
    "gptq 3": make.gptq(3, 32),
    "gptq 5": make.gptq(5, 32),
    "gptq 6": make.gptq(6, 64),
    "gptq 7": make.gptq(7, 32, version=2),
    "gptq 8 act-order": make.gptq(8, 32, act_order=True, version=2),
    "modelopt nvfp4": make.modelopt_nvfp4(),
    "modelopt fp8 blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]},
        make.renamed(
            make.fp8(128)[1], {"weight_scale_inv": "weight_scale", "weight": "weight"}, lambda s: s[:, None, :, None]
        ),
    ),
    "fbgemm fp8": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        make.compressed_tensors("float-quantized", **CT_FP8, strategy="channel")[1],
    ),
    "fp8 e8m0": make.fp8(128, scale_fmt="ue8m0"),
    "auto-round gptq": make.auto_round("auto_round:auto_gptq", make.gptq(4, 32)),
    "auto-round gptq 3": make.auto_round("auto_round:auto_gptq", make.gptq(3, 32)),
    "auto-round gptqmodel": make.auto_round("auto_round:gptqmodel", make.gptq(4, 32, version=2)),
    "auto-round 2": make.auto_round("auto_round", make.gptq(2, 64, version=2)),
    "auto-round awq": make.auto_round("auto_round:auto_awq", make.awq(32)),
    "quark fp8 tensor": make.quark(
        QUARK_FP8 | {"qscheme": "per_tensor"},
        make.compressed_tensors("float-quantized", **CT_FP8, strategy="tensor")[1],
    ),
    "quark fp8 channel": make.quark(
        QUARK_FP8 | {"qscheme": "per_channel", "ch_axis": 0},
        make.compressed_tensors("float-quantized", **CT_FP8, strategy="channel")[1],
    ),
    "quark int8": make.quark(
        {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True},
        make.compressed_tensors("int-quantized", num_bits=8, strategy="channel")[1],
    ),
    "quark mxfp4": make.quark(
        {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1},
        make.renamed(
            make.compressed_tensors(
                "mxfp4-pack-quantized",
                num_bits=4,
                type="float",
                strategy="group",
                group_size=32,
                scale_dtype="torch.uint8",
            )[1],
            {"weight_packed": "weight", "weight_scale": "weight_scale"},
        ),
    ),
    "quark int4": make.quark_int4(symmetric=True, reorder=True),
    "quark uint4": make.quark_int4(symmetric=False, reorder=True),
    "quark uint4 in order": make.quark_int4(symmetric=False, reorder=False),
    "bnb fp4": make.bitsandbytes(4, kind="fp4"),
    "bnb int8": make.bitsandbytes(8),
    "bnb nf4": make.bitsandbytes(4),
    "bnb nf4 nested": make.bitsandbytes(4, nested=True),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    from tests.helpers.models.checkpoints import build_checkpoint

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


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_exact(sources, tmp_path, name):
    folder = Path(make.write(sources("qwen3"), tmp_path, *FORMATS[name]))
    model, plain = load(folder / "quantized"), load(folder / "plain")
    for (path, layer), expected in zip(model.named_modules(), plain.modules()):
        if isinstance(layer, Linear):
            assert torch.equal(weight_of(layer), expected.weight), path
    assert torch.allclose(logits_of(model), logits_of(plain), atol=1e-3, rtol=1e-4)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    from tests.helpers.models.families import build_family

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return build_family("phi3", tmp_path_factory.mktemp("phi3"), **SIZES, num_attention_heads=8, rope_parameters=rope)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_projections_that_are_fused_in_the_file(phi3, tmp_path, name):
    """qkv_proj and gate_up_proj have one set of scales; two ranks have rows of each of their parts."""
    folder = Path(make.write(phi3, tmp_path, *FORMATS[name]))
    model, plain = load(folder / "quantized"), load(folder / "plain")
    for (path, layer), expected in zip(model.named_modules(), plain.modules()):
        if isinstance(layer, Linear):
            assert torch.equal(weight_of(layer), expected.weight), path
    expected, models = logits_of(plain), []
    for group in thread_groups(2):
        with use_groups(tp=group):
            models.append(load(folder / "quantized"))
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_load_their_share(sources, tmp_path, name):
    """160 columns of down_proj per rank, and fused rows: blocks and words that straddle the ranks' borders."""
    folder = Path(make.write(sources("llama2"), tmp_path, *FORMATS[name]))
    expected, models = logits_of(load(folder / "plain")), []
    for group in thread_groups(2):
        with use_groups(tp=group):
            models.append(load(folder / "quantized"))
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ct w4a16 zeros", "ct w8a8", "awq", "gptq 4 act-order", "gptq 3", "ct mxfp4", "fp8 blocks"]
)
def test_native_kernels_multiply_what_is_stored(sources, tmp_path, native_kernels, exact_activations, name):
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
        ({"quant_method": "awq", "bits": 3}, "bits 3 is not supported; supported: 4"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128 is not supported"),
        (
            {"quant_method": "fp8", "expert_dtype": "int4"},
            "expert_dtype 'int4' is not supported; supported: fp8 or fp4",
        ),
        ({"quant_method": "gguf", "gguf_file": "m.gguf"}, "supported: the .gguf file itself as MODEL"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp' is not supported"),
        ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "act_bits 8 is not supported; supported: 16"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
            "packing_format 'auto_round:llm_compressor' is not supported; supported: auto_round, auto_round:auto_gptq",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e2m3", "qscheme": "per_group"}}},
            "weight {'dtype': 'fp6_e2m3', 'qscheme': 'per_group'} is not supported; supported: fp8_e4m3 and int8",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION' is not"),
        ({"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
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


SERVED = {
    "awq": {},
    "gptq": {"bits": 4},
    "bitsandbytes": {"load_in_8bit": True},
    "compressed-tensors": {"config_groups": {}},
    "fp8": {},
    "fbgemm_fp8": {},
    "mxfp4": {},
    "mxfp8": {"weight_block_size": [1, 32]},
    "auto-round": {"bits": 4},
    "quark": {},
    "gguf": {"types": {}},
}


@pytest.mark.parametrize("method", [method.value for method in QuantizationMethod])
def test_methods_of_transformers_are_served_or_refused_by_name(sources, method):
    raw = json.loads(Path(sources("qwen3"), "config.json").read_text())
    spec = parse_model_spec({**raw, "quantization_config": {"quant_method": method} | SERVED.get(method, {})})
    if method in SERVED:
        build_model(spec, torch.float32, torch.device("meta"))
        return
    words = f"quant_method '{method}' is not supported; supported: fp8, .*Serve the model's original weights instead"
    with pytest.raises(ValueError, match=words):
        build_model(spec, torch.float32, torch.device("meta"))


@pytest.mark.parametrize(("name", "file"), [("gptq 4", "quantize_config.json"), ("awq", "quant_config.json")])
def test_settings_beside_config_json(sources, tmp_path, name, file):
    """As older exports have them, which do not name the method."""
    folder = Path(make.write(sources("qwen3"), tmp_path, *FORMATS[name])) / "quantized"
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    if name == "awq":
        settings["w_bit"], settings["q_group_size"] = settings.pop("bits"), settings.pop("group_size")
    (folder / "config.json").write_text(json.dumps(config))
    for target in (folder, folder.parent / "plain"):  # which has no such weights
        (target / file).write_text(json.dumps(settings))
    assert torch.allclose(logits_of(load(folder)), logits_of(load(folder.parent / "plain")), atol=1e-3)


def test_overrides_of_auto_round(sources, tmp_path):
    (_, four), (_, eight) = make.gptq(4, 64), make.gptq(8, 32)
    extra = {
        "model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float", "act_bits": 16},
        r".*layers\.\d\.mlp\.down_proj.*": {"bits": 8, "group_size": 32},
    }
    blocks = "model.layers.0,model.layers.1.mlp"
    config, _ = make.auto_round("auto_round:auto_gptq", make.gptq(4, 64), extra_config=extra)

    def store(name, weight):
        if name == "model.layers.0.mlp.down_proj" or name.startswith("model.layers.1.self_attn"):
            return {}, weight
        tensors, value = (eight if name.endswith("down_proj") else four)(name, weight)
        return {key: t for key, t in tensors.items() if key not in ("g_idx", "bias")}, value

    config["block_name_to_quantize"] = blocks
    folder = Path(make.write(sources("qwen3"), tmp_path, config, store))
    assert torch.allclose(logits_of(load(folder / "quantized")), logits_of(load(folder / "plain")), atol=1e-3)


def test_layers_of_quark(sources, tmp_path):
    """Another scheme for layers that a pattern names, plain ones, and the scales of a KV cache."""
    (config, tensor), (other, channel) = FORMATS["quark fp8 tensor"], FORMATS["quark fp8 channel"]
    outputs = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    layers = {f"*{name}_proj": config["global_quant_config"] | {"output_tensors": outputs} for name in "kv"}
    config = config | {
        "layer_quant_config": {"*down_proj": other["global_quant_config"]} | layers,
        "exclude": ["lm_head", "model.layers.0.mlp.up_proj", "re:.*1\\.self_attn\\.q_proj"],
        "export": config["export"] | {"kv_cache_group": ["*k_proj", "*v_proj"]},
    }

    def store(name, weight):
        if name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
            return {}, weight
        tensors, value = (channel if name.endswith("down_proj") else tensor)(name, weight)
        scales = {"input_scale": torch.ones(())}
        if name.endswith(("k_proj", "v_proj")):
            scales["output_scale"] = torch.tensor(0.5)
        return tensors | scales, value

    folder = Path(make.write(sources("qwen3"), tmp_path, config, store))
    assert torch.allclose(logits_of(load(folder / "quantized")), logits_of(load(folder / "plain")), atol=1e-3)
    assert read_scales(str(folder / "quantized")) == {0: (0.5, 0.5), 1: (0.5, 0.5)}
    raw = json.loads((folder / "quantized" / "config.json").read_text())
    assert declared(raw).kind == "fp8"


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
