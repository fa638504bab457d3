"""A key that a GGUF file leaves out has llama.cpp's default, or the value that the tensors have: for every architecture
each key of `tests/helpers/models/llama_cpp_keys.py` is left out in turn.
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
from quire.checkpoints.gguf.keys import ARCHITECTURE, settle_ids
from quire.checkpoints.gguf.metadata import FULL, SLIDING
from quire.checkpoints.gguf.model_config import model_config
from quire.checkpoints.reading import KeptReads
from quire.worker.models.registry import parse_model_spec
from quire.worker.spec.model import ModelSpec
from tests.checkpoints.test_gguf_encoders import encoder_keys
from tests.checkpoints.test_gguf_families import CASES, LANGUAGE_MODELS, SIZES, Case, pair, plain_deepseek
from tests.checkpoints.test_gguf_gated import CASES as GATED
from tests.checkpoints.test_gguf_gated import build as build_gated
from tests.checkpoints.test_gguf_plamo import LONG, random_weights
from tests.checkpoints.test_gguf_plamo import write_gguf as write_plamo
from tests.checkpoints.test_gguf_states import build as build_states
from tests.helpers import twins
from tests.helpers.models.encoders import build_embedding_gemma, build_encoder
from tests.helpers.models.gguf_converter import Converter, common
from tests.helpers.models.llama_cpp_keys import OWN, REQUIRED, TENSORS, As, keys_of

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
OTHERS = {"deepseek", "deepseek2-ocr", "glm5-next", "minimax-01", "plamo2", "plamo3", "step35"}
OTHERS |= {case[0] for case in GATED.values()}
STATES = {"glm5-next": "glm5_next", "minimax-01": "minimax", "step35": "step3p5"}
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
    elif gated := next((name for name, case in GATED.items() if case[0] == arch), None):
        build_gated(gated, folder)
    else:
        build_states(STATES[arch], folder)
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


@pytest.mark.slow
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


# ---- what depends on more than one key


def config_of(arch: str, **changes: Any) -> Keys:
    """Return the config of a file without tensors."""
    keys = {
        "block_count": 8, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6, "logit_scale": 1.0,
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}
    return model_config(GgufFile(Path("model.gguf"), KeptReads(metadata), {}), {})


def test_exaone4_has_windows_in_the_32b_and_where_a_file_lists_them():
    large = config_of("exaone4", block_count=64)
    assert large["sliding_window"] == 4096 and large["layer_types"][:4] == [SLIDING] * 3 + [FULL]
    assert config_of("exaone4", block_count=64, attention__sliding_window=32)["sliding_window"] == 32
    assert config_of("exaone4", attention__sliding_window=32)["sliding_window"] is None
    listed = config_of("exaone4", attention__sliding_window=32, attention__sliding_window_pattern=2)
    assert listed["sliding_window"] == 32 and listed["layer_types"] == [SLIDING, FULL] * 4


@pytest.mark.parametrize("arch", ["gemma3", "modern-bert", "olmo2", "plamo3"])
@pytest.mark.parametrize("window", [{}, {"attention__sliding_window": 0}])
def test_without_a_window_all_layers_are_full(arch, window):
    spec = parse_model_spec(config_of(arch, attention__sliding_window_pattern=4, **window) | {"vocab_size": 8})
    assert [layer.window for layer in spec.layers] == [None] * 8
    assert len({layer.rope for layer in spec.layers}) == 1  # none has the base of windowed layers


EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}


def test_zero_is_no_scale_and_no_group():
    config = config_of("glm4moe", **EXPERTS, expert_weights_scale=0.0, expert_group_count=0, expert_group_used_count=0)
    assert (config["routed_scaling_factor"], config["n_group"], config["topk_group"]) == (1.0, 1, 1)
    assert config_of("command-r", logit_scale=0.0)["logit_scale"] == 1.0


def test_an_original_context_length_without_scaling_changes_nothing():
    """As llama.cpp's converter writes it for HunYuan-A13B."""
    scaling = {"rope__scaling__type": "none", "rope__scaling__factor": 1.0}
    config = config_of("hunyuan-moe", **EXPERTS, **scaling, rope__scaling__original_context_length=262144)
    assert config["rope_scaling"] == {"rope_type": "default"}


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("hy_v3", EXPERTS, r"hy_v3\.expert_weights_norm must be True, not False"),
        ("lfm2", {"attention__sliding_window": 32}, r"lfm2\.attention\.sliding_window must be 0, not 32"),
        ("qwen3moe", {}, r"the metadata has no qwen3moe\.expert_count"),
        ("gemma4", {"attention__sliding_window": 32}, r"the metadata has no gemma4\.attention\.sliding_window_pattern"),
    ],
)
def test_defaults_that_are_not_served_and_required_keys(arch, changes, words):
    with pytest.raises(ValueError, match=words):
        config_of(arch, **changes)


@pytest.mark.parametrize(
    ("model", "kinds", "named", "expected"),
    [
        ("llama", [2, 3, 3, 1], {}, {"bos": 1, "eos": 2, "unknown": 0}),
        ("llama", [2, 3, 3, 1], {"eos": 3}, {"bos": 1, "eos": 3, "unknown": 0}),
        ("llama", [2, 3, 3, 1], {"eos": 9}, {"bos": 1, "eos": 2, "unknown": 0}),  # not in the vocabulary
        ("t5", [3, 3, 2, 1], {}, {"eos": 1, "unknown": 2, "padding": 0}),
        ("gpt2", [1] * 12, {}, {}),  # a comma in most vocabularies
        ("gpt2", [1] * 11 + [3], {}, {"bos": 11, "eos": 11}),  # Falcon
        ("gpt2", [], {}, {}),
    ],
)
def test_special_tokens_that_a_file_does_not_name(model, kinds, named, expected):
    metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": [str(i) for i in range(len(kinds))]}
    metadata |= {"tokenizer.ggml.token_type": kinds}
    metadata |= {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in named.items()}
    settle_ids(metadata, Path("model.gguf"))
    found = {name: token_id for name, token_id in metadata.items() if name.endswith("_token_id")}
    assert found == {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in expected.items()}


def test_the_tables_know_all_architectures_and_keys():
    assert ARCHITECTURES.keys() == OWN.keys() == {arch for _, arch in NAMES}
    assert DEFAULTS.keys() <= ARCHITECTURE.keys()
    kinds = {kind for defaults in DEFAULTS.values() for default in defaults for kind in default.kinds}
    assert kinds <= ARCHITECTURES.keys()
