"""`quire quantize`: the compressed-tensors package decodes the same weights from its checkpoints as quire does, and
transformers loads them; GPTQ changes outputs less than rounding to nearest does.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from quire.cli.main import main
from quire.configs.sources import embedded_model
from quire.worker.layers.linear import Linear
from quire.worker.quantize.formats import choose_format
from quire.worker.quantize.gptq import gptq
from quire.worker.quantize.run import Settings, quantize_checkpoint
from quire.worker.quantize.stages import cut
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.families import build_family
from tests.worker.layers.test_stored_weights import load, logits_of, weight_of

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def texts(vocabulary: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(4, vocabulary, (40 * 32,), generator=torch.Generator().manual_seed(1))
    return cut(ids.tolist(), 32, 30, None)


def quantized(source: str, out: Path, method: str = "rtn", **settings) -> tuple[dict[str, torch.Tensor], dict]:
    """(the tensors, the quantization_config) of the quantized checkpoint."""
    out.mkdir()
    quantize_checkpoint(source, out, Settings(method=method, **settings), texts() if method == "gptq" else None)
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())["quantization_config"]


def decoded(tensors: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """The weights that the compressed-tensors package reads."""
    scheme = next(iter(QuantizationConfig.model_validate(config).config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    found = {}
    for name in tensors:
        if name.endswith("weight_scale"):
            prefix = name.removesuffix("weight_scale")
            of_weight = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(f"{prefix}weight")}
            # in the type of the scales: their decompress rounds to it
            of_weight["weight_scale"] = of_weight["weight_scale"].float()
            found[f"{prefix}weight"] = compressor.decompress(of_weight, scheme)["weight"].float()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("form", ["int4", "int8", "w8a8", "fp8"])
def test_the_package_and_transformers_read_the_same_weights(tmp_path, form, method):
    from transformers import AutoModelForCausalLM

    source = build_checkpoint("qwen3", tmp_path / "source", **SIZES)
    tensors, config = quantized(source, tmp_path / "out", method, format=form)
    weights, original = decoded(tensors, config), load_file(Path(source, "model.safetensors"))
    assert len(weights) == 14 and weights.keys() <= original.keys()
    assert original.keys() - weights.keys() <= tensors.keys()
    # the same through our loader: replace each weight by its decoded value
    plain = tmp_path / "plain"
    build_checkpoint("qwen3", plain, **SIZES)
    save_file(original | weights, plain / "model.safetensors", {"format": "pt"})
    ours, expected = load(tmp_path / "out"), load(plain)
    for (path, layer), other in zip(ours.named_modules(), expected.modules()):
        if isinstance(layer, Linear):
            assert torch.equal(weight_of(layer), other.weight), path
    ids = torch.arange(4, 60)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for module in theirs.modules():  # they also round activations to 8 bits, which we do not
        if getattr(module, "quantization_scheme", None):
            module.quantization_scheme.input_activations = None
    with torch.inference_mode():
        logits = theirs(ids[None]).logits[0]
    assert torch.allclose(logits_of(ours, ids.tolist()), logits, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("mixtral", "qwen3-moe", "qwen2-moe", "granite-moe", "glm4-moe", "deepseek-v3", "glm-5", "hunyuan-moe"),
        "minimax-m2",
    ],
)
def test_experts(tmp_path, name):
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 64} | (
        {} if name in ("mixtral", "granite-moe", "hunyuan-moe", "minimax-m2") else {"moe_intermediate_size": 64}
    )
    if name in ("deepseek-v3", "glm-5"):
        sizes |= {"q_lora_rank": 64}
    if name == "glm-5":  # its index stays as it is, and the second layer has none
        sizes |= {"index_topk": 800, "indexer_types": ["full", "shared"]}
    source = build_checkpoint(name, tmp_path / "source", **sizes)
    original = load_file(Path(source, "model.safetensors"))
    tensors, config = quantized(source, tmp_path / "out", "gptq", format="int8", group_size=32)
    names = {key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")}
    # every projection of attention, of all experts, and of shared experts, by itself; nothing else
    assert not [key for key in names if not key.endswith(("_proj", ".w1", ".w2", ".w3", "_mqa"))]
    for expert in (".experts.0.", ".experts.3."):
        assert len([key for key in names if expert in key]) in (3, 6)
    left = {key.removesuffix(".weight") for key, t in tensors.items() if key.endswith(".weight") and t.dim() == 2}
    assert left - {"model.embed_tokens"} <= set(config["ignore"])
    assert [key for key in left if "gate" in key or "router" in key]
    for key in left:
        assert torch.equal(tensors[f"{key}.weight"], original[f"{key}.weight"])
    exact = logits_of(load(source))
    assert float((logits_of(load(tmp_path / "out")) - exact).norm()) < 0.3 * float(exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3", "gemma2", "glm4", "qwen3_5", "nemotron_h"])
def test_fused_and_reordered_weights(tmp_path, name):
    sizes = {"intermediate_size": 48} if name == "qwen3_5" else {}  # a multiple of the group
    source = build_family(name, tmp_path / "source", **sizes)
    ids = torch.randint(0, 128, (8, 32), generator=torch.Generator().manual_seed(1))
    (tmp_path / "out").mkdir()
    settings = Settings("int8", "gptq", group_size=16)
    report = quantize_checkpoint(source, tmp_path / "out", settings, (ids[:6], ids[6:]))
    before, after = report.perplexity
    assert abs(after / before - 1) < 0.1
    expected, found = logits_of(load(source)), logits_of(load(tmp_path / "out"))
    assert 0 < float((found - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [32, 96, 256, -1])
def test_gptq_changes_outputs_less(act_order, group):
    generator = torch.Generator().manual_seed(2)
    columns = 768
    mixing = torch.randn(columns, columns, generator=generator) * torch.rand(columns, generator=generator) ** 4
    x = torch.randn(4096, columns, generator=generator) @ mixing
    weight = torch.randn(40, columns, generator=generator)
    weight[:, 7] = 0
    x[:, 9] = 0  # an input that is never seen
    form = choose_format("int4", {"w": columns}, group)

    def error(found) -> float:
        return float((x @ (found.dequantized() - weight).T).norm() / (x @ weight.T).norm())

    smart = gptq(weight, x.T @ x / len(x), form, act_order)
    assert error(smart) < (0.75 if act_order else 0.85) * error(form.nearest(weight))
    assert smart.values.abs().max() <= 8 and smart.scales.shape == (40, 1 if group == -1 else columns // group)


def test_perplexity_is_that_of_transformers(tmp_path):
    from tests.helpers.models.checkpoints import load_reference

    source = build_checkpoint("llama3", tmp_path / "source", **SIZES)
    calibration, held = texts()
    (tmp_path / "out").mkdir()
    report = quantize_checkpoint(source, tmp_path / "out", Settings("int4", "rtn"), (calibration, held))
    for folder, found in zip((source, tmp_path / "out"), report.perplexity):
        with torch.inference_mode():
            logits = load_reference(str(folder))(held).logits[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten()).exp()
        assert abs(found / float(expected) - 1) < 1e-4


def test_texts_are_cut():
    ids = list(range(100, 200))
    calibration, held = cut(ids, 10, 5, None)
    assert calibration.shape == (5, 10) and calibration[0].tolist() == ids[:10]
    assert held.shape == (2, 10) and held[-1].tolist() == ids[-10:]
    calibration, held = cut(ids, 11, 100, 1)
    assert calibration.shape == (8, 11) and calibration[1].tolist() == [1, *ids[10:20]]
    with pytest.raises(ValueError, match="the text has 19 tokens; at least 20 are needed"):
        cut(ids[:19], 10, 5, None)


def test_shards(tmp_path, monkeypatch):
    source = build_checkpoint("qwen3", tmp_path / "source", sharded=True, **SIZES)
    monkeypatch.setattr("quire.worker.quantize.run.SHARD_BYTES", 100_000)
    (tmp_path / "out").mkdir()
    quantize_checkpoint(source, tmp_path / "out", Settings("int8", "rtn"), None)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 3 and {path.name for path in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for path in files for t in load_file(path).values())
    expected = logits_of(load(source))
    assert float((logits_of(load(tmp_path / "out")) - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (lambda folder: build_family("gpt2", folder), {}, "hold matrices as \\[in, out\\]"),
        (lambda folder: build_checkpoint("gpt-oss", folder), {}, "the experts of GptOssForCausalLM have biases"),
        (
            lambda folder: build_checkpoint("qwen3", folder),
            {"group_size": 48},
            "--group-size 48 does not divide the 64 columns of model.layers.0.self_attn.q_proj",
        ),
        (lambda folder: build_checkpoint("qwen3", folder), {"format": "fp8", "group_size": 32}, "fp8 has one scale"),
        (lambda folder: build_checkpoint("qwen3", folder), {"format": "w8a8", "group_size": 32}, "w8a8 has one scale"),
    ],
)
def test_what_cannot_be_quantized_is_refused(tmp_path, build, settings, words):
    with pytest.raises(ValueError, match=words):
        quantized(build(tmp_path / "source"), tmp_path / "out", **{"format": "int4"} | settings)


def test_command(tmp_path, capsys):
    source, out = build_checkpoint("qwen3", tmp_path / "source", **SIZES), str(tmp_path / "out")
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    flags = ["--format", "int4", "--calibration", str(tmp_path / "text"), "--sequence-length", "32"]
    assert main(["quantize", source, out, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{out}: 14 weights in int4 (groups of 128)")
    assert "perplexity of the text's last quarter: " in lines[1]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    for arguments, words in (
        ([source, out, "--format", "int4"], "exists and is not an empty folder"),
        ([out, f"{out}2", "--format", "int8"], "quantized already"),
        ([source, f"{out}3", "--format", "int4", "--method", "gptq"], "--method gptq needs --calibration FILE"),
    ):
        assert main(["quantize", *arguments]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_download_and_layers_are_bars_or_lines(tmp_path, capsys, caplog, monkeypatch, terminal):
    source = build_checkpoint("qwen3", tmp_path / "source", **SIZES)

    def resolve(model, *, progress, **options):
        progress("downloading", 0.25)
        return source

    monkeypatch.setattr("quire.cli.quantize.hub.resolve", resolve)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    caplog.set_level(logging.INFO)
    assert main(["quantize", "org/model", str(tmp_path / "out"), "--format", "int8"]) == 0
    shown = capsys.readouterr().err
    assert "layer 2 of 2: 7 weights" in shown
    if terminal:
        assert "downloading:  25%|" in shown and "quantizing:  50%|" in shown
    else:
        assert "downloading\n" in shown and "quantizing" not in shown


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "quire quantize: interrupted, nothing is left in "),
        (OSError(28, "No space left on device"), 1, "error: cannot write "),
        (SafetensorError("I/O error: No space left on device"), 1, "model-00001.safetensors.part: I/O error: No space"),
    ],
)
@pytest.mark.parametrize("existed", [False, True])
def test_failures_leave_nothing(tmp_path, capsys, monkeypatch, error, status, words, existed):
    source, out = build_checkpoint("qwen3", tmp_path / "source", **SIZES), tmp_path / "out"
    if existed:
        out.mkdir()

    def fail(tensors, path, metadata):
        path.write_bytes(b"the beginning")
        raise error

    monkeypatch.setattr("quire.worker.quantize.writer.save_file", fail)
    assert main(["quantize", source, str(out), "--format", "int8"]) == status
    assert words in capsys.readouterr().err
    assert out.exists() == existed and not (existed and list(out.iterdir()))


@pytest.fixture(scope="module")
def embedded_perplexity() -> tuple[str, list, float]:
    """Return the folder of the embedded model, texts and its perplexity over them."""
    folder = embedded_model()
    if folder is None:
        pytest.skip("the embedded model has no weights in this tree")
    from benchmarks import perplexity
    from tests.helpers.models.tiny_conversations import tiny_conversations

    texts = tiny_conversations(Tokenizer.from_file(str(Path(folder, "tokenizer.json"))), count=20)
    return folder, texts, perplexity.perplexity(folder, texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "most"),
    [
        *[("int8", 1.002), ("w8a8", 1.002), ("fp8", 1.003), ("int4", 1.005)],
        *[("Q8_0", 1.002), ("Q5_0", 1.003), ("Q4_0", 1.005), ("MXFP4", 1.005)],
    ],
)
def test_perplexity_of_the_embedded_model(embedded_perplexity, tmp_path, form, most):
    folder, texts, before = embedded_perplexity
    from benchmarks import perplexity
    from tests.helpers.models.tiny_conversations import NUM_MEASURED, tiny_conversations

    if form.isupper():
        made, _ = perplexity.in_gguf(folder, tmp_path / "made", form)
    else:
        made = str(tmp_path / "made")
        Path(made).mkdir()
        tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        ids = [token for one, _ in tiny_conversations(tokenizer, NUM_MEASURED, 60) for token in one]
        quantize_checkpoint(folder, Path(made), Settings(form, "gptq"), cut(ids, 256, 24, None))
    after = perplexity.perplexity(made, texts)
    assert before < 1.02 and 0.99 * before < after < most * before
