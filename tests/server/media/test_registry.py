"""Which models take images, and what their processors are made from."""

from __future__ import annotations

import json

import pytest

from quire.configs.config import Config
from quire.server.media import registry
from quire.server.media.registry import load_processor, why_no_images
from quire.server.media.service import Images
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.server.running import write_model_folder
from tests.server.media.conftest import write_seeing_model


class Processor:
    def __init__(self, config, preprocessor):
        self.config, self.preprocessor = config, preprocessor


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model whose architecture has a processor."""
    monkeypatch.setitem(registry.PROCESSORS, "SeeingForConditionalGeneration", "seeing:Processor")
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: __import__(__name__, fromlist=["Processor"]))
    write(tmp_path, "config.json", {"architectures": ["SeeingForConditionalGeneration"], "vision_config": {}})
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_reasons(monkeypatch):
    monkeypatch.setitem(registry.PROCESSORS, "Seeing", "seeing:Processor")
    monkeypatch.setitem(registry.TEXT_ONLY, "Half", "its encoder is not served")
    assert why_no_images({"architectures": ["Seeing"], "vision_config": {}}) is None
    assert "no vision encoder" in why_no_images({"architectures": ["Seeing"]})
    assert "LlamaForCausalLM" in why_no_images({"architectures": ["LlamaForCausalLM"], "vision_config": {}})
    assert why_no_images({"architectures": ["Half"], "vision_config": {}}) == "its encoder is not served"
    assert "none is named" in why_no_images({})


def test_a_processor_gets_the_image_processors_settings(folder):
    write(folder, "preprocessor_config.json", {"size": 4, "image_seq_length": 9})
    write(folder, "processor_config.json", {"image_seq_length": 7, "patch": 2, "image_processor": {"size": 5}})
    assert load_processor(folder).preprocessor == {"size": 4, "image_seq_length": 9, "patch": 2}
    (folder / "preprocessor_config.json").unlink()
    assert load_processor(folder).preprocessor == {"size": 5, "image_seq_length": 7, "patch": 2}
    (folder / "processor_config.json").unlink()
    assert load_processor(folder).preprocessor == {}


def test_files_that_cannot_be_read(folder):
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*preprocessor_config\.json"):
        load_processor(folder)
    write(folder, "preprocessor_config.json", [1])
    with pytest.raises(ValueError, match="must be a JSON object"):
        load_processor(folder)


def test_models_without_images_have_no_processor(tmp_path):
    write(tmp_path, "config.json", {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ValueError, match="takes no images"):
        load_processor(tmp_path)


@pytest.mark.parametrize("reads", [True, False])
def test_settings_of_images_without_effect_are_named(tmp_path, caplog, reads):
    folder = write_seeing_model(tmp_path) if reads else str(write_model_folder(tmp_path))
    settings = {"limit_mm_per_prompt": '{"image": {"count": 2, "width": 9}}'}
    settings |= {} if reads else {"mm_processor_kwargs": '{"nonsense": 1}'}
    images = Images(Config.from_flat(model=folder, **settings))
    images.open(folder, Tokenizer.load(folder))
    assert images.max_images == 2 and (images.why_not is None) == reads
    assert "--limit-mm-per-prompt image.width: no effect" in caplog.text
    assert ("--mm-processor-kwargs nonsense: no effect, because images are refused" in caplog.text) != reads
