"""Which chat template a folder has, against transformers' processors and tokenizers."""

from __future__ import annotations

import itertools
import json

import pytest
from transformers.processing_utils import ProcessorMixin

from quire.checkpoints.templates import model_templates
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.models.checkpoints import build_tokenizer

PLACES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")


def write(folder, *places):
    """Each template's text is the name of its place."""
    for place in places:
        text = place if place.endswith(".jinja") else json.dumps({"chat_template": place})
        (folder / place).write_text(text)


@pytest.mark.parametrize("places", [c for n in range(4) for c in itertools.combinations(PLACES[:3], n)])
def test_a_processors_order_is_transformers(places, tmp_path):
    (tmp_path / "processor_config.json").write_text("{}")
    write(tmp_path, *places)
    expected = ProcessorMixin.get_processor_dict(str(tmp_path))[0].get("chat_template")
    assert model_templates(tmp_path, {}).get("default") == expected
    assert model_templates(tmp_path, {"chat_template": "own"})["default"] == (expected or "own")


def test_a_tokenizers_order(tmp_path):
    """Without a processor the tokenizer's files come first, and what only processors read comes last."""
    write(tmp_path, "chat_template.json")
    assert model_templates(tmp_path, {}) == {"default": "chat_template.json"}
    assert model_templates(tmp_path, {"chat_template": "own"}) == {"default": "own"}
    write(tmp_path, "chat_template.jinja")
    assert model_templates(tmp_path, {"chat_template": "own"}) == {"default": "chat_template.jinja"}


def test_named_templates_in_a_json_file(tmp_path):
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    assert model_templates(tmp_path, {}) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("content", ["[]", "{", '{"chat_template": 1}', '{"chat_template": [{"name": "x"}]}', "\xff"])
def test_what_is_no_template_is_refused_by_file(content, tmp_path):
    (tmp_path / "chat_template.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"chat_template\.json"):
        model_templates(tmp_path, {})


def test_conflicting_files_are_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    write(tmp_path, "chat_template.json")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    with pytest.raises(ValueError, match=r"both chat_template\.json and additional_chat_templates"):
        model_templates(tmp_path, {})


def test_the_tokenizer_has_it(tmp_path):
    build_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    for found in tmp_path.glob("*.jinja"):
        found.unlink()
    assert not Tokenizer.load(tmp_path).chat_templates
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "Hi"}]) == "Hi!"
