"""A key that a GGUF file leaves out has llama.cpp's default, or the value that the tensors have: for every architecture
each key of `tests/llama_cpp_keys.py` is left out in turn.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoints.gguf.architectures import ARCHITECTURES
from quire.checkpoints.gguf.defaults import DEFAULTS
from quire.checkpoints.gguf.folder import rope_factors
from quire.checkpoints.gguf.header import GgufFile, read_gguf
from quire.checkpoints.gguf.keys import ARCHITECTURE
from quire.checkpoints.gguf.model_config import model_config
from quire.checkpoints.reading import KeptReads
from quire.worker.models.registry import parse_model_spec
from quire.worker.transformer.config import ModelSpec
from tests import twins
from tests.encoders import build_embedding_gemma, build_encoder
from tests.gguf_converter import Converter, common
from tests.llama_cpp_keys import OWN, REQUIRED, TENSORS, As, keys_of
from tests.worker.test_gguf_encoders import encoder_keys
from tests.worker.test_gguf_families import CASES, LANGUAGE_MODELS, SIZES, Case, pair, plain_deepseek
from tests.worker.test_gguf_plamo import LONG, random_weights
from tests.worker.test_gguf_plamo import write_gguf as write_plamo
from tests.worker.test_gguf_states import build as build_states

Keys = dict[str, Any]
PLAIN = {"default": "F32"}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# (name of a checkpoint, architecture) -> how to build it
DECODERS: dict[tuple[str, str], Case] = {(name, case[0]): case for name, case in CASES.items()}
DECODERS |= {(name, case[0]): case for name, case in LANGUAGE_MODELS.items()}
DECODERS |= {
    (name, arch): (arch, SIZES | _ROPE, lambda c: {})
    for name, arch in (("llama3", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"))
}
OTHERS = {"deepseek", "deepseek2-ocr", "glm5-next", "minimax-01", "plamo2", "plamo3"}
ENCODERS = {"bert": "bert", "modern-bert": "modernbert", "nomic-bert": "nomic", "gemma-embedding": None}
NAMES = [*DECODERS, *((arch, arch) for arch in sorted(OTHERS | ENCODERS.keys()))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")


def written(name: str, arch: str, folder: Path) -> GgufFile:
    """Return the header of a file of the architecture."""
    path = folder / "model.gguf"
    if case := DECODERS.get((name, arch)):
        pair(name, folder, PLAIN, case)
    elif arch in ENCODERS:
        _write_encoder(arch, folder, path)
    elif arch.startswith("plamo"):
        config = getattr(twins, f"{arch}_config")() | (LONG if arch == "plamo2" else {})
        write_plamo(path, config, random_weights(arch, config))
    elif arch.startswith("deepseek"):
        plain_deepseek(folder, arch, PLAIN)
    else:
        build_states({"glm5-next": "glm5_next", "minimax-01": "minimax"}[arch], folder)
    return read_gguf(path)


def _write_encoder(arch: str, folder: Path, path: Path) -> None:
    name = ENCODERS[arch]
    source = build_encoder(name, folder / "source") if name else build_embedding_gemma(folder / "source")
    config = json.loads(Path(source, "config.json").read_text())
    keys = encoder_keys(name, source) if name else {"attention.causal": False, "attention.sliding_window_pattern": 6}
    Converter(source, path, arch, PLAIN).run(common(config) | keys)


def without(file: GgufFile, key: str, **changes: Any) -> GgufFile:
    prefix = file.metadata["general.architecture"]
    metadata = {name: value for name, value in file.metadata.items() if name != f"{prefix}.{key}"}
    metadata |= {f"{prefix}.{name}": value for name, value in changes.items()}
    return GgufFile(file.path, KeptReads(metadata), file.tensors)


def spec_of(file: GgufFile) -> ModelSpec | str:
    """Return the model's spec, or the message with which the file is refused."""
    try:
        spec = replace(parse_model_spec(model_config(file, rope_factors(file))), raw={})
    except ValueError as error:
        return str(error)
    # layers of experts only have no MLP with this width
    layers = [replace(one, intermediate_size=0) if one.mlp in ("moe", "none") else one for one in spec.layers]
    return replace(spec, layers=tuple(layers))


def own_keys(file: GgufFile) -> Keys:
    prefix = f"{file.metadata['general.architecture']}."
    return {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("name", "arch"), NAMES)
def test_each_key_left_out(name, arch, tmp_path):
    file, wrong = written(name, arch, tmp_path), {}
    whole = spec_of(file)
    assert isinstance(whole, ModelSpec), whole
    for key, default in keys_of(arch).items():
        found = spec_of(without(file, key))
        if default is REQUIRED and isinstance(found, str):
            assert f"{arch}.{key}" in found and "the metadata has n" in found, found
            continue
        if default in (REQUIRED, TENSORS):
            expected = whole
        else:
            value = default.value(own_keys(without(file, key))) if isinstance(default, As) else default
            expected = spec_of(without(file, key, **{key: value}))
        both_refused = isinstance(found, str) and isinstance(expected, str)
        if found != expected and not both_refused:
            wrong[key] = found, expected
    assert not wrong, wrong


def test_the_tables_know_all_architectures_and_keys():
    assert ARCHITECTURES.keys() == OWN.keys() == {arch for _, arch in NAMES}
    assert DEFAULTS.keys() <= ARCHITECTURE.keys()
    kinds = {kind for defaults in DEFAULTS.values() for default in defaults for kind in default.kinds}
    assert kinds <= ARCHITECTURES.keys()
