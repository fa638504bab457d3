"""GGUF files of GLM-5: which layers choose keys by themselves."""

from __future__ import annotations

import pytest

from quire.checkpoints.gguf.folder import gguf_folder
from quire.worker.models.registry import read_model_spec
from tests.checkpoints.test_gguf_families import CASES
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_converter import Converter, common

GLM_5_2 = 1 << 20  # the context length of GLM-5.2, whose files need not list the layers


@pytest.mark.parametrize(
    ("keys", "sources"),
    [
        ({}, [None] * 8),
        ({"context_length": GLM_5_2}, [None, None, None, 2, 2, 2, None, 6]),
        ({"attention.indexer.types": [True, False] * 4}, [None, 0, None, 2, None, 4, None, 6]),
        ({"context_length": GLM_5_2, "attention.indexer.types": [True] * 8}, [None] * 8),
    ],
)
def test_layers_that_choose(keys, sources, tmp_path):
    arch, sizes, of_model = CASES["glm-5"]
    folder = build_checkpoint("glm-5", tmp_path / "source", **(sizes | {"num_hidden_layers": 8}))
    converter = Converter(folder, tmp_path / "model.gguf", arch, {"default": "F32"}, split_latents=True)
    converter.run(common(converter.config) | of_model(converter.config) | keys)
    spec = read_model_spec(gguf_folder(str(tmp_path / "model.gguf")))
    assert [layer.index.source for layer in spec.layers] == sources
    assert {(layer.index.heads, layer.index.dim, layer.index.top) for layer in spec.layers} == {(24, 32, 20)}
