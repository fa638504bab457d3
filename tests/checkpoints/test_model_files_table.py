"""Every key that other libraries read from a model's files has an entry, and what an entry says is so."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path

import pytest

from quire.checkpoints.honoured import FILES, HONOURED, REFUSED, refuse, report_ignored
from quire.configs.config import Config
from quire.server.request.sampling import read_sampling_defaults
from quire.worker.models.registry import read_model_spec
from quire.worker.transformer.pooling import read_pooling
from tests.helpers.models.embedders import write_modules
from tests.helpers.models.encoders import build_encoder
from tools.site import model_files

ROOT = Path(__file__).parent.parent.parent


def test_the_page_has_every_key():
    page = model_files.page()
    assert not [key for entries in FILES.values() for key in entries if f"| `{key}` | " not in page]


def test_transformers_keys_have_entries():
    from transformers import GenerationConfig
    from transformers.processing_utils import ImagesKwargs

    assert not GenerationConfig().to_dict().keys() - FILES["generation_config.json"].keys()
    assert not ImagesKwargs.__annotations__.keys() - FILES["preprocessor_config.json"].keys()


@pytest.mark.slow
def test_sentence_transformers_keys_have_entries():
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    def arguments(cls) -> set[str]:
        return set(inspect.signature(inspect.unwrap(cls.__init__)).parameters) - {"self", "kwargs", "args"}

    known = FILES["sentence_bert_config.json"].keys()
    assert not (arguments(Transformer) | set(Transformer.config_keys)) - known - {"model_name_or_path"}
    assert not set(Pooling.config_keys) - FILES["1_Pooling/config.json"].keys()
    assert not set(Dense.config_keys) - FILES["2_Dense/config.json"].keys()


def test_honoured_keys_occur_in_the_code():
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("checkpoints", "server", "worker")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "honoured.py"
    ]
    text = "\n".join(sources)
    keys = {key for entries in FILES.values() for key, entry in entries.items() if entry.effect == HONOURED}
    assert not {key for key in keys if f'"{key}"' not in text}


REFUSALS = [
    (name, key)
    for name, entries in FILES.items()
    if name[0] in "s12"  # those of sentence-transformers
    for key, entry in entries.items()
    if entry.effect == REFUSED
]


@pytest.mark.parametrize(("name", "key"), REFUSALS)
def test_refused_keys_are_refused(name, key, tmp_path):
    folder = build_encoder("bert", tmp_path / "model")
    write_modules(Path(folder), 64, "mean", dense=((64, 8),))
    path = Path(folder, name)
    (Path(folder) / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"q": "x"}, "default_prompt_name": "q"})
    )
    content = json.loads(path.read_text()) if path.is_file() else {}
    value = False if key == "include_prompt" else "token_embeddings" if "module" in key else {"text": {"a": 1}}
    path.write_text(json.dumps(content | {key: value}))
    with pytest.raises(ValueError, match=rf"config\.json: {key} "):
        read_pooling(folder, read_model_spec(folder))


def test_truncate_dim_is_the_default_of_dimensions(tmp_path):
    folder = build_encoder("bert", tmp_path / "model", mode="mean")
    Path(folder, "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 16}))
    found = read_pooling(folder, read_model_spec(folder))
    assert found.matryoshka and found.default_dimensions == 16


def test_what_has_no_effect_is_reported(tmp_path, caplog):
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": ["x"], "num_beams": 1, "top_k": 3}))
    with caplog.at_level(logging.WARNING):
        assert read_sampling_defaults(Config(), str(tmp_path)).declared == {"top_k": 3}
    assert "no effect: stop_strings" in caplog.text and "num_beams" not in caplog.text


def test_neutral_values_are_not_refused():
    refuse("sentence_bert_config.json", {"query_length": None, "processing_kwargs": {}}, Path("x"))
    report_ignored({"num_beams": 1}, Path("x"))
