"""Files of models with any content are read or refused in one line, in bounded time and memory, and never leave their
folder.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import resource
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quire.checkpoints.safetensors import read_header, read_index, weight_names
from quire.checkpoints.weight_summary import weight_summary
from quire.server.text.tokenizer import Tokenizer
from quire.worker.models.registry import WRAPPERS, build_model, read_model_spec
from quire.worker.transformer.pooling import read_pooling
from quire.worker.weights.checkpoint import Checkpoint
from tests.helpers.models.checkpoints import build_tokenizer
from tests.helpers.models.embedders import write_modules
from tools import model_types

CONFIGS = json.loads(Path(__file__).parents[1].joinpath("worker", "models", "hub_configs.json").read_text())
LIMITS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
hostile = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2**31, 2**31 - 1, 2**63, -(2**63), 10**400, 0.5, 1e308, float("nan"),
         float("inf"), "", "x", "\ud83d", "a" * 10_000, [], {}, [None], [[]], {"a": {}}, [2**40] * 3, DEEP],
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=5,
    ),
)  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths to every entry of nested objects and lists."""
    if not isinstance(value, dict | list) or len(path) > 6:
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [found for key, inner in items for found in ((*path, key), *places(inner, (*path, key)))]


@st.composite
def mutants(draw, bases: list[dict[str, Any]]) -> dict[str, Any]:
    """One of `bases` with up to three entries changed, removed or added."""
    content = copy.deepcopy(draw(st.sampled_from(bases)))
    for _ in range(draw(st.integers(1, 3))):
        if not (found := places(content)):
            break
        path = draw(st.sampled_from(found))
        target = content
        for key in path[:-1]:
            target = target[key]
        if draw(st.integers(0, 5)) == 0:
            del target[path[-1]]
        else:
            target[path[-1]] = copy.deepcopy(draw(hostile))
    return content


@contextmanager
def bounded():
    """At most 2 seconds of CPU time and 300 MB; an error is one line."""
    memory, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    try:
        yield
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 3000, error
    assert time.thread_time() - started < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300 << 10


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Every family's module is imported."""
    folder = tmp_path_factory.mktemp("families")
    for raw in CONFIGS.values():
        (folder / "config.json").write_text(json.dumps(raw))
        read_model_spec(str(folder), "quire")


@pytest.mark.slow
@settings(max_examples=250, **LIMITS)
@given(raw=mutants(list(CONFIGS.values())))
def test_any_config_json(families, tmp_path_factory, raw):
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(raw))
    with bounded():
        read_model_spec(str(folder), "quire")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"\xff", b'{"a":' + b"[" * 100_000, b"[" * 100_000, b"null"]
)
def test_what_is_no_object(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_spec(str(tmp_path))


def test_the_key_is_named(tmp_path):
    for key, value in [("num_hidden_layers", 2**31), ("num_attention_heads", "8"), ("rope_theta", []), ("dtype", 3)]:
        raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8, key: value}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=rf"config\.json: {key} must be "):
            read_model_spec(str(tmp_path))


# types with an encoder -> keys that their default configurations lack
SEEING = {
    "glm_ocr": {}, "granite_docling": {}, "inkling2": {}, "kimi_k25": {}, "lfm3_vl": {}, "qwen3_vl": {},
    "minicpmv4_6": {"image_token_id": 5},
}  # fmt: skip


def whole_numbers(value: Any) -> list[tuple]:
    return [path for path in places(value) if type(_at(value, path)) is int]


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SEEING)
def test_any_number_of_an_encoder(model_type, tmp_path):
    """Encoders are built on the meta device: a number above what the file may have is refused, others are cheap."""
    config = transformers.CONFIG_MAPPING[model_type]()
    raw = json.loads(config.to_json_string(use_diff=False)) | SEEING[model_type]
    raw["architectures"] = [next(name for name in model_types.data()["types"][model_type]["names"] if name in WRAPPERS)]
    numbers = whole_numbers(raw["vision_config"])
    assert len(numbers) > 8
    refused = []
    for path, value in itertools.product(numbers, (2**31, 1 << 16)):
        changed, name = copy.deepcopy(raw), ".".join(key for key in path if isinstance(key, str))
        _at(changed["vision_config"], path[:-1])[path[-1]] = value
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with bounded():
            try:
                spec = read_model_spec(str(tmp_path), "quire")
            except ValueError as error:
                refused.append((path[-1], value))
                assert f"vision_config.{name} must be a whole number" in str(error)
                continue
            few = replace(spec, layers=spec.layers[: 1 + len(spec.vision.deep)])
            build_model(few, torch.bfloat16, torch.device("meta"), 16)
    layers = {"num_hidden_layers", "depth"} & set(raw["vision_config"])
    assert {("patch_size", 2**31), *((name, 1 << 16) for name in layers)} <= set(refused)


@pytest.mark.parametrize("part", ["vision_config", "audio_config"])
def test_the_key_of_an_encoder_is_named(part, tmp_path):
    for key, value in [("patch_size", 2**61 - 1), ("n_layers", 10**12), ("temporal_patch_size", 0), ("depth", -1)]:
        raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, part: {key: value}}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=rf"config\.json: {part}\.{key} must be a whole number from "):
            read_model_spec(str(tmp_path))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder with a model's configuration, tokenizer and pooling."""
    folder = tmp_path_factory.mktemp("base")
    build_tokenizer(folder)
    raw = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 512, "hidden_size": 64,
           "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
           "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    write_modules(folder, 64, "mean", dense=((64, 8),))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "q"}, "default_prompt_name": "query", "truncate_dim": 8})
    )
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.5}))
    return folder


SMALL = ("tokenizer_config.json", "sentence_bert_config.json", "config_sentence_transformers.json", "modules.json",
         "1_Pooling/config.json", "2_Dense/config.json", "chat_template.json", "generation_config.json")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_any_small_file(base, name):
    path, spec = base / name, read_model_spec(str(base))
    before = path.read_text()

    @settings(max_examples=25, **LIMITS)
    @given(content=mutants([{"whole": json.loads(before)}]))
    def check(content):
        path.write_text(json.dumps(content.get("whole", content)))
        with bounded():
            Tokenizer.load(base)
        with bounded():
            read_pooling(str(base), spec)

    try:
        check()
    finally:
        path.write_text(before)


# ---- safetensors


def header(path: Path, content: Any, data: bytes = b"\0" * 64) -> None:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


HEADER = {
    "__metadata__": {"format": "pt"},
    "lm_head.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [32, 64]},
}


@pytest.mark.slow
@settings(max_examples=100, **LIMITS)
@given(content=mutants([{"whole": HEADER}]))
def test_any_safetensors_header(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("weights")
    header(folder / "model.safetensors", content.get("whole", content))
    raw = {"architectures": ["LlamaForCausalLM"], "vocab_size": 2, "max_position_embeddings": 8, "hidden_size": 4,
           "intermediate_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1,
           "tie_word_embeddings": True}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    for read in (
        lambda: read_model_spec(str(folder)),
        lambda: weight_summary(str(folder), raw, 16),
        lambda: Checkpoint(str(folder)).__enter__().__exit__(),
    ):
        with bounded():
            read()


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + b"\0" * 7, (2**40).to_bytes(8, "little") + b"{}"])
def test_damaged_files(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors.*(damaged|download)"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:\\x", "a\0b", 3, None, ""]
)
def test_names_stay_inside_the_folder(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        read_index(tmp_path)


def shards(folder: Path, index: dict[str, str] | None, **files: dict[str, float]) -> str:
    for name, tensors in files.items():
        save_file({key: torch.tensor([value]) for key, value in tensors.items()}, folder / f"{name}.safetensors")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return str(folder)


def test_two_tensors_of_one_name(tmp_path):
    """The index decides, else nobody can."""
    folder = shards(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"}, a={"x": 1}, b={"x": 2, "y": 3})
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.tensor("x") == 1 and checkpoint.tensor("y") == 3
    shards(tmp_path, {"z": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(ValueError, match=r"the tensor x is in several files of .*: a\.safetensors, b\.safetensors"):
        Checkpoint(folder).__enter__()


def test_an_index_beside_a_single_file(tmp_path, caplog):
    folder = shards(tmp_path, {"x": "a.safetensors"}, a={"x": 1}, model={"x": 2})
    with caplog.at_level(logging.WARNING), Checkpoint(folder) as checkpoint:
        assert checkpoint.tensor("x") == 2
    assert "has both model.safetensors and model.safetensors.index.json" in caplog.text
    shards(tmp_path, {"x": "model.safetensors"})
    assert weight_names(tmp_path) == ["model.safetensors"]
