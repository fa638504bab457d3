"""Models of every kind are served with quire's packages alone, after `tools/slim.py`."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from quire.configs.sources import embedded_model
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.encoders import build_encoder
from tests.helpers.models.lora import make_adapter
from tests.helpers.server.process import answers, ask, serving
from tools import slim

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs an empty interpreter")]

ROOT = Path(__file__).parent.parent.parent


def needed() -> dict[str, metadata.Distribution]:
    """Return the installed packages that an image has, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing, found = [*project["dependencies"], *project["optional-dependencies"]["files"]], {}
    while missing:
        requirement = Requirement(missing.pop())
        name = requirement.name.lower()
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[name] = metadata.distribution(name)
            missing += found[name].requires or ()
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables for the base interpreter with a slim copy of the packages."""
    site, copy = Path(sysconfig.get_path("purelib")), tmp_path_factory.mktemp("site")
    for distribution in needed().values():
        for file in distribution.files or ():
            path = Path(os.path.normpath(file.locate()))
            if path.is_relative_to(site) and path.is_file():
                (target := copy / path.relative_to(site)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    used = [Path(path) for path in slim.imported()]
    removed = slim.slim(copy, [str(copy / path.relative_to(site)) for path in used if path.is_relative_to(site)])
    assert removed["torch's tests"] > 1e7 and not (copy / "rich").exists()
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{copy}", "PYTHONNOUSERSITE": "1"}


@pytest.fixture
def serve(environment, tmp_path):
    python = [sys._base_executable]
    return lambda *arguments: serving(python, environment, tmp_path / "log", arguments=arguments)


@pytest.mark.parametrize("flags", [(), ("--model-impl", "transformers")])
def test_texts_and_structures(serve, flags):
    with serve("quire-tiny", *flags) as client:
        answers(client)


def test_adapters(serve, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", embedded_model(), rank=4, targets=("q_proj", "v_proj"))
    with serve("quire-tiny", "--enable-lora", "--lora-modules", f"style={adapter}") as client:
        assert ask(client, "Hello", model="style") != ask(client, "Hello")


def test_embeddings(serve, tmp_path):
    folder = build_encoder("bert", tmp_path / "model")
    with serve(folder, "--served-model-name", "encoder") as client:
        answer = client.post("/v1/embeddings", json={"model": "encoder", "input": "Hello"})
        assert answer.status_code == 200 and len(answer.json()["data"][0]["embedding"]) > 1


def test_gguf_files_and_several_ranks(serve, tmp_path):
    pytest.importorskip("gguf")
    from tests.helpers.models.gguf_files import write_gguf

    source = build_checkpoint("qwen3", tmp_path / "source")
    write_gguf(source, tmp_path / "m.gguf", {"default": "Q8_0"}, "qwen3")
    for arguments in ([str(tmp_path / "m.gguf")], [source, "--tensor-parallel-size", "2"]):
        with serve(*arguments, "--served-model-name", "m") as client:
            answer = client.post("/v1/completions", json={"model": "m", "prompt": "Hello", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
