"""GGUF files: blocks dequantize as in the `gguf` package, and a served file gives the logits, token ids and prompts of
the checkpoint it was made from.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from quire.checkpoints.gguf.folder import chosen_files, first_file, gguf_folder, hub_patterns
from quire.checkpoints.gguf.header import BLOCKS, read_gguf
from quire.checkpoints.gguf.model_config import model_config
from quire.checkpoints.hub import local_folder, ready_folder
from quire.server.text.tokenizer import Tokenizer
from quire.worker.cpu.blocks import packed_blocks
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.fixed_order_linear import fix_order
from quire.worker.layers.quantization.blocks import Rows
from quire.worker.layers.quantization.gguf_blocks import BLOCK_TYPES, dequantize
from quire.worker.parallel import use_groups
from tests.helpers.models.checkpoints import TEXT, build_checkpoint
from tests.helpers.models.gguf_files import blocks_of, write_gguf
from tests.helpers.worker.ranks import run_ranks, thread_groups
from tests.worker.layers.test_stored_weights import TEXT as IDS
from tests.worker.layers.test_stored_weights import load, logits_of

gguf = pytest.importorskip("gguf")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_dequantize_as_in_the_gguf_package(kind):
    weight = np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32)
    blocks = blocks_of(weight, kind)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert torch.equal(dequantize(torch.from_numpy(blocks), kind), torch.from_numpy(expected))
    assert tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]) == BLOCKS[kind]


def pair(
    name: str, tmp_path: Path, kinds: dict[str, str], arch: str, tokenizer: str = "gpt2", **sizes
) -> tuple[str, str]:
    """(the folder made of a GGUF file, the checkpoint with the weights that the file stands for)."""
    source = build_checkpoint(name, tmp_path / "source", **SIZES | sizes)
    plain = write_gguf(source, tmp_path / "model.gguf", kinds, arch, tokenizer)
    save_file(plain, Path(source, "model.safetensors"), {"format": "pt"})
    return gguf_folder(str(tmp_path / "model.gguf")), source


SPECIAL = {"llama-bias": {"mlp_bias": False}, "qwen3": {"head_dim": 64}}
MODELS = [
    (
        "qwen3",
        "qwen3",
        {"default": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "token_embd": "Q4_K"},
    ),
    ("qwen2", "qwen2", {"default": "Q8_0", "token_embd": "F16"}),
    ("llama3", "llama", {"default": "Q5_K", "attn_k": "Q3_K", "token_embd": "Q2_K"}),
    ("llama-tied", "llama", {"default": "Q4_0", "attn_q": "IQ4_XS", "token_embd": "Q6_K"}),
    ("llama-bias", "llama", {"default": "MXFP4", "attn_q": "Q5_1", "ffn_up": "IQ4_NL", "token_embd": "Q4_1"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "kinds"), MODELS)
def test_models(tmp_path, name, arch, kinds):
    folder, source = pair(name, tmp_path, kinds, arch, **SPECIAL.get(name, {}))
    assert torch.allclose(logits_of(load(folder)), logits_of(load(source)), atol=2e-3, rtol=1e-3)
    model = load(folder)
    held = sum(t.nbytes for t in {t.data_ptr(): t for t in [*model.parameters(), *model.buffers()]}.values())
    assert held < (tmp_path / "model.gguf").stat().st_size + (1 << 20)  # rotary tables


def test_ranks(tmp_path):
    """256 columns of down_proj and 128 of o_proj per rank: half a block of Q4_K."""
    folder, source = pair("llama3", tmp_path, {"default": "Q4_K", "attn_v": "Q8_0"}, "llama")
    expected, models = logits_of(load(source)), []
    for group in thread_groups(2):
        with use_groups(tp=group):
            models.append(load(folder))
    for logits in run_ranks(lambda rank: logits_of(models[rank]), 2):
        assert torch.allclose(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("name", "tokenizer"), [("qwen3", "gpt2"), ("llama3", "gpt2"), ("llama2", "llama")])
def test_tokenizers(tmp_path, name, tokenizer):
    arch = "qwen3" if name == "qwen3" else "llama"
    folder, source = pair(name, tmp_path, {"default": "F16"}, arch, tokenizer, hidden_size=64)
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(source)
    text = TEXT if tokenizer == "gpt2" else TEXT.replace("\n", " ")
    for piece in (text, "a  b\n\n c", "  two spaces", "<|im_start|>user: 1234 hi<|im_end|>", "Ä🙂"):
        assert ours.encode(piece) == theirs.encode(piece), piece
        assert ours.decode(ours.encode(piece)) == theirs.decode(theirs.encode(piece))
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)
    assert 2 in ours.eos_token_ids and ours.special_ids == theirs.special_ids


def test_shards_are_read_together(tmp_path):
    source = build_checkpoint("qwen3", tmp_path / "source", **SIZES)
    write_gguf(source, tmp_path / "model.gguf", {"default": "Q8_0"}, "qwen3")
    file = read_gguf(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert {name: (tensor.shape, tensor.start, tensor.size) for name, tensor in file.tensors.items()} == {
        t.name: (tuple(int(n) for n in t.shape[::-1]), t.data_offset, t.n_bytes) for t in reader.tensors
    }
    bare = read_gguf(tmp_path / "model.gguf", arrays=False)
    assert bare.tensors == file.tensors
    assert bare.metadata == {key: value for key, value in file.metadata.items() if not isinstance(value, list)}
    (tmp_path / "parts").mkdir()
    write_gguf(source, tmp_path / "parts" / "part.gguf", {"default": "Q8_0"}, "qwen3", tensors_per_shard=15)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 2 and read_gguf(parts[1]).tensors.keys() == file.tensors.keys()
    for i in (1, 2):  # the second has the tensors of the first
        shutil.copy(tmp_path / "model.gguf", tmp_path / f"part-0000{i}-of-00002.gguf")
    with pytest.raises(ValueError, match=r"the tensor blk\.0\.attn_k\.weight is in .*part-00002-of-00002\.gguf and"):
        read_gguf(tmp_path / "part-00002-of-00002.gguf")
    (tmp_path / "part-00001-of-00002.gguf").unlink()
    with pytest.raises(ValueError, match=r"is one of 2 shards; missing in its folder: part-00001-of-00002\.gguf"):
        read_gguf(tmp_path / "part-00002-of-00002.gguf")


def test_what_cannot_be_served_is_refused(tmp_path):
    source = build_checkpoint("qwen3", tmp_path / "source", **SIZES)
    path = tmp_path / "model.gguf"
    write_gguf(source, path, {"default": "Q8_0"}, "qwen3")
    whole = path.read_bytes()
    for length in (3, 30, 5000, len(whole) - 100):
        path.write_bytes(whole[:length])
        for arrays in (True, False):
            with pytest.raises(ValueError, match=r"damaged|not a GGUF file"):
                read_gguf(path, arrays=arrays)
    path.write_bytes(
        whole.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00qwen3", b"\x05\x00\x00\x00\x00\x00\x00\x00rwkv6", 1)
    )
    with pytest.raises(ValueError, match="architecture 'rwkv6' of GGUF files is not supported; supported: afmoe, "):
        model_config(read_gguf(path), None)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.gguf is empty"):
        read_gguf(path)
    at = whole.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 2 * 8
    path.write_bytes(whole[:at] + bytes([16]) + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_down\.weight has the type IQ2_XXS, .*another quantization"):
        read_gguf(path)
    path.write_bytes(whole.replace(b"qwen2", b"weird"))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'weird' is not supported; supported: a"):
        gguf_folder(str(path))


@pytest.mark.parametrize(
    ("arch", "kind", "words"),
    [
        ("qwen3", "adapter", "a LoRA adapter"),
        ("clip", "mmproj", r"an encoder of images \(mmproj\)"),
        ("clip", None, r"an encoder of images \(mmproj\)"),
        ("imatrix", "imatrix", "an importance matrix"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, arch, kind, words):
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, arch)
    if kind:
        writer.add_type(kind)
    writer.add_tensor("a", np.zeros((8, 32), np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ValueError, match=rf"other\.gguf is {words}, not a language model"):
        gguf_folder(str(path))


def test_a_file_may_have_any_name(tmp_path):
    """Those of Ollama are called by their hash."""
    folder, _ = pair("qwen3", tmp_path, {"default": "Q8_0"}, "qwen3")
    (tmp_path / "model.gguf").rename(tmp_path / "sha256-0a1b")
    path, told = str(tmp_path / "sha256-0a1b"), []
    assert ready_folder(path) is None  # a server answers its port before it converts
    other = local_folder(path, lambda *report: told.append(report))
    assert Path(other, "config.json").is_file() and other != folder and ready_folder(path) == other
    assert [phase for phase, _ in told] == ["reading the GGUF file"] * 3
    assert [fraction for _, fraction in told] == sorted({fraction for _, fraction in told})
    with pytest.raises(ValueError, match=r"there is no file .*model\.gguf"):
        local_folder(str(tmp_path / "model.gguf"))


def test_names_on_the_hub(tmp_path):
    assert hub_patterns("org/name") is None and hub_patterns("./a.gguf") is None
    assert hub_patterns("org/name/sub/a.gguf") == ("org/name", ["sub/a.gguf"])
    assert hub_patterns("org/name/a-00001-of-00003.gguf") == ("org/name", ["a-*-of-00003.gguf"])
    assert hub_patterns("org/name:Q4_K_M")[0] == "org/name"
    for name in ("m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m-Q4_K_S.gguf", "mmproj-Q8_0.gguf"):
        (tmp_path / name).touch()
    assert first_file(str(tmp_path), "org/name:q4_k_m").endswith("m-Q4_K_M-00001-of-00002.gguf")
    names = [path.name for path in tmp_path.iterdir()]
    both = [f"m-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert chosen_files(names, "org/name:Q4_K_M") == chosen_files(names, f"org/name/{both[0]}") == both
    assert chosen_files(names, "org/name:q4_k_s") == ["m-Q4_K_S.gguf"]
    with pytest.raises(ValueError, match=re.escape("it names none; there are m-Q4_K_M-00001-of-00002.gguf, m-Q4_K_M-")):
        first_file(str(tmp_path), "org/name:Q9")
    with pytest.raises(ValueError, match=re.escape("org/name has no file a.gguf; there are m-Q4_K_M-00001")):
        first_file(str(tmp_path), "org/name/a.gguf")
    with pytest.raises(
        ValueError, match=re.escape("org/name:Q4 must name one GGUF file of its repository; it names m-")
    ):
        first_file(str(tmp_path), "org/name:Q4")


def test_the_folder_is_made_once_per_file(tmp_path):
    folder, _ = pair("qwen3", tmp_path, {"default": "Q8_0"}, "qwen3")
    before = Path(folder, "config.json").stat().st_mtime_ns
    assert gguf_folder(str(tmp_path / "model.gguf")) == folder
    assert Path(folder, "config.json").stat().st_mtime_ns == before
    assert json.loads(Path(folder, "generation_config.json").read_text()) == {"eos_token_id": [2, 0]}


def test_packed_parts_of_several_types(native_kernels):
    """q, k and v of three types, and rows that are missing, e.g. of a padded vocabulary."""
    rng, kinds = np.random.default_rng(5), ("Q3_K", "IQ4_XS", "Q5_0")
    parts = [
        Rows(torch.from_numpy(blocks_of(rng.normal(size=(n, 256)).astype(np.float32), kind)), kind)
        for n, kind in zip((40, 8, 8), kinds)
    ]
    layer = SimpleNamespace(in_features=256, out_features=60, bias=torch.randn(60), gated=None)
    weight = F.pad(torch.cat([part.dequantized() for part in parts]), (0, 0, 0, 4))
    x = torch.randn(3, 256).bfloat16()
    out, expected = packed_blocks(layer, parts)(x, torch.float32), x.float() @ weight.T + layer.bias
    assert (out - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "kinds"), MODELS)
def test_models_by_activations_of_8_bits(tmp_path, native_kernels, name, arch, kinds):
    folder, source = pair(name, tmp_path, kinds, arch, **SPECIAL.get(name, {}))
    exact = logits_of(load(source))
    rounding = float((logits_of(load(source, torch.bfloat16)) - exact).norm())
    native = load(folder, torch.bfloat16, CpuPlatform().ops)
    assert float((logits_of(native) - exact).norm()) < 6 * rounding


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch", "kinds"), MODELS)
def test_models_on_native_kernels(tmp_path, native_kernels, exact_activations, name, arch, kinds):
    folder, source = pair(name, tmp_path, kinds, arch, **SPECIAL.get(name, {}))
    exact = logits_of(load(source))
    rounding = float((logits_of(load(source, torch.bfloat16)) - exact).norm())
    native = load(folder, torch.bfloat16, CpuPlatform().ops)
    logits = logits_of(native)
    assert float((logits - exact).norm()) < 1.5 * rounding
    fix_order(native)
    alone = torch.cat([logits_of(native, IDS[:n])[-1:] for n in (5, 12, 30)])
    assert torch.equal(alone, logits_of(native)[[4, 11, 29]])
    held = sum(t.nbytes for t in {t.data_ptr(): t for t in [*native.parameters(), *native.buffers()]}.values())
    assert held < (tmp_path / "model.gguf").stat().st_size + (1 << 20)
