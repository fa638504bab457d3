"""GGUF files of encoders and of decoders for embeddings: the vectors and logits of sentence-transformers and
transformers for the weights that the file's blocks stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from quire.checkpoints.gguf.folder import write_folder
from quire.checkpoints.gguf.header import GgufFile, read_gguf
from quire.checkpoints.gguf.model_config import model_config
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.embedders import TEXTS, build_embedder, reference_embeddings
from tests.helpers.models.encoders import build_embedding_gemma, build_encoder
from tests.helpers.models.gguf_converter import Converter, common
from tests.helpers.models.gguf_files import blocks_of
from tests.worker.transformer.test_pooling import encode, pooled

gguf = pytest.importorskip("gguf")

ARCHES = {"bert": "bert", "roberta": "bert", "xlm-roberta": "bert", "modernbert": "modern-bert", "nomic": "nomic-bert"}
TYPES = {"mean": 1, "cls": 2, "lasttoken": 3}
KINDS = {"default": "Q8_0", "ffn_up": "Q4_1", "token_embd": "Q5_1", "cls": "Q8_0", "output": "F16"}


def convert(source: str, path: Path, arch: str, keys: dict[str, Any]) -> str:
    """The folder made of `source`'s GGUF file; `source` then has the weights that the file stands for."""
    converter = Converter(source, path, arch, KINDS)
    converter.run(common(converter.config) | keys)
    return folder_of(path)


def folder_of(path: Path) -> str:
    folder = path.with_suffix("")
    write_folder(read_gguf(path), folder)
    return str(folder)


def encoder_keys(name: str, source: str) -> dict[str, Any]:
    config = json.loads(Path(source, "config.json").read_text())
    keys: dict[str, Any] = {"attention.causal": False}
    if name == "modernbert":
        ropes = config["rope_parameters"]
        keys |= {
            "attention.sliding_window": config["local_attention"],
            "attention.sliding_window_pattern": 3,
            "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
        }
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("name", ARCHES)
def test_vectors_are_those_of_sentence_transformers(tmp_path, name, mode):
    source = build_encoder(name, tmp_path / "source", mode=mode)
    keys = encoder_keys(name, source) | {"pooling_type": TYPES[mode]}
    engine = InProcessEngine(convert(source, tmp_path / "model.gguf", ARCHES[name], keys), dtype="float32")
    found = pooled(engine, encode(source), normalize=True)
    torch.testing.assert_close(found, reference_embeddings(source, TEXTS), rtol=2e-4, atol=2e-4)
    info = engine.ready.pooling
    assert info.whole_prompts and not info.generates and info.method == mode and info.normalize


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "modernbert"])
def test_classifiers(tmp_path, name):
    import transformers

    source = build_encoder(name, tmp_path / "source", "ForSequenceClassification", num_labels=3)
    keys = encoder_keys(name, source) | {"pooling_type": 4, "classifier.output_labels": ["good", "bad", "ugly"]}
    if name == "modernbert":
        keys["classifier.pooling_type"] = 2
    engine = InProcessEngine(convert(source, tmp_path / "model.gguf", ARCHES[name], keys), dtype="float32")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([ids])).logits for ids in encode(source)])
    found = pooled(engine, encode(source), task="classify")
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    assert engine.ready.pooling.labels == ["good", "bad", "ugly"]


@pytest.mark.slow
def test_embedding_gemma(tmp_path):
    """With the layers after pooling, which llama.cpp's converter writes on demand."""
    source = build_embedding_gemma(tmp_path / "source")
    config = json.loads(Path(source, "config.json").read_text())
    config["query_pre_attn_scalar"] = config["head_dim"]  # as in all that llama.cpp knows
    Path(source, "config.json").write_text(json.dumps(config))
    converter = Converter(source, tmp_path / "model.gguf", "gemma-embedding", KINDS)
    for folder, name in (("2_Dense", "dense_2"), ("3_Dense", "dense_3")):
        path = tmp_path / "source" / folder / "model.safetensors"
        tensors = load_file(path)
        blocks = blocks_of(tensors["linear.weight"], "Q8_0")
        converter.writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        tensors["linear.weight"] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        save_file(tensors, path)
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    converter.run(
        common(config)
        | {"attention.sliding_window_pattern": kinds, "pooling_type": 1}
        | {"rope.freq_base_swa": 10000.0, "attention.causal": False}
    )
    engine = InProcessEngine(folder_of(tmp_path / "model.gguf"), dtype="float32")
    found = pooled(engine, encode(source), normalize=True)
    torch.testing.assert_close(found, reference_embeddings(source, TEXTS), rtol=2e-4, atol=2e-4)
    assert engine.ready.pooling.num_dimensions == 64


@pytest.mark.slow
def test_a_decoder_for_embeddings(tmp_path):
    source = build_embedder("qwen3", tmp_path / "source", hidden_size=64, intermediate_size=96, head_dim=32)
    folder = convert(source, tmp_path / "model.gguf", "qwen3", {"pooling_type": 3})
    engine = InProcessEngine(folder, dtype="float32")
    found = pooled(engine, encode(source), normalize=True)
    torch.testing.assert_close(found, reference_embeddings(source, TEXTS), rtol=2e-4, atol=2e-4)
    assert not engine.ready.pooling.generates and engine.ready.pooling.tasks == ["embed"]


@pytest.mark.parametrize(
    ("arch", "keys", "words"),
    [
        ("qwen3", {"pooling_type": 4}, r"qwen3\.pooling_type 4 is not supported; supported: 1, 2, 3"),
        ("bert", {}, r"BERT without position_embd\.weight is not supported"),
        ("clip", {}, "is an encoder of images"),
    ],
)
def test_what_is_refused(tmp_path, arch, keys, words):
    file = GgufFile(tmp_path / "model.gguf", {"general.architecture": arch}, {})
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    found = common(config | {"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6}) | keys
    file.metadata.update({f"{arch}.{key}": value for key, value in found.items()})
    with pytest.raises(ValueError, match=words):
        model_config(file, {})


def test_a_classifier_without_its_first_layer_is_refused(tmp_path):
    """As llama.cpp's converter writes those of BERT, whose pooler it drops."""
    source = build_encoder("bert", tmp_path / "source", "ForSequenceClassification", num_labels=3)
    with pytest.raises(ValueError, match=r"the classifier's layer before its output \(cls\.weight\) is missing"):
        convert(source, tmp_path / "model.gguf", "bert", encoder_keys("bert", source))
