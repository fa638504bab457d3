"""Folders and files that are not a model or cannot be read: one line names the file and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.checkpoints import hub
from quire.checkpoints.files import check_model_folder, damaged_weights
from quire.cli import main as cli
from quire.configs.config import Config
from quire.server.text.tokenizer import Tokenizer
from quire.worker.models.registry import read_model_spec
from quire.worker.weights.loader import check_model
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.server.light_model import write_light_model

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run as an unprivileged user, to whom permissions apply even if the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The folder of a model without weights, which every user can enter."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    write_light_model(path)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


def refusal(folder: Path | str) -> str:
    with pytest.raises(ValueError) as caught:
        check_model_folder(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_folder_passes(folder):
    check_model_folder(str(folder))


def test_a_folder_without_a_model(tmp_path):
    assert "is empty" in refusal(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    assert "there is no config.json" in (said := refusal(tmp_path)) and "notes.md" in said
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    assert f"give one of the files, e.g. {tmp_path}/model.Q4_K_M.gguf" in refusal(tmp_path)


def test_a_repository_of_gguf_files_on_the_hub(tmp_path):
    """Nothing of it is downloaded."""
    (tmp_path / "models--org--model-GGUF" / "snapshots").mkdir(parents=True)
    assert "give one file, e.g. ORG/NAME:Q4_K_M or" in refusal(tmp_path / "models--org--model-GGUF" / "snapshots")


def test_a_clone_without_its_large_files(folder):
    (folder / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{folder}/tokenizer.json is a pointer of Git LFS" in refusal(folder)


def test_a_gguf_file():
    with (
        tempfile.NamedTemporaryFile(suffix=".gguf") as file,
        pytest.raises(ValueError, match=r"is not a GGUF file|cannot read|damaged|empty"),
    ):
        hub.local_folder(file.name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_without_permission_is_named(folder, name):
    (folder / name).chmod(0o200)
    with without_privileges():
        assert f"cannot read {folder}/{name}: permission denied (--w-------" in refusal(folder)
        with pytest.raises(ValueError, match=r"permission denied"):
            Tokenizer.load(folder)


def test_a_folder_without_permission(folder):
    folder.chmod(0o300)
    with without_privileges():
        assert f"cannot read {folder}: permission denied (d-wx------" in refusal(folder)
    folder.chmod(0o600)
    with (
        without_privileges(),
        pytest.raises(ValueError, match=r"permission denied \(no permission to enter a folder above it"),
    ):
        hub.local_folder(f"{folder}/inside")


@pytest.fixture
def weights(folder) -> Iterator[Path]:
    """model.safetensors of a complete checkpoint in `folder`."""
    built = build_checkpoint("qwen3", folder / "built")
    shutil.copy(f"{built}/model.safetensors", folder)
    shutil.copy(f"{built}/config.json", folder)
    check_model(Config.from_flat(model=str(folder)))
    return folder / "model.safetensors"


def loading_error(weights: Path) -> str:
    with pytest.raises(ValueError) as caught:
        check_model(Config.from_flat(model=str(weights.parent)))
    return str(caught.value)


def test_weights_without_permission(weights):
    weights.chmod(0o000)
    with without_privileges():
        assert f"cannot read {weights}: permission denied (----------" in loading_error(weights)


def test_damaged_weights_should_be_downloaded_again(weights):
    whole = weights.read_bytes()
    for content in (whole[:-100], whole[:50], b"", os.urandom(5000)):
        weights.write_bytes(content)
        assert f"cannot read the weights in {weights}: " in (said := loading_error(weights)) and said.endswith(
            "incomplete or damaged: download it again"
        )
    config = json.loads((weights.parent / "config.json").read_text())
    config.pop("dtype", None), config.pop("torch_dtype", None)
    (weights.parent / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="download it again"):
        read_model_spec(str(weights.parent))  # reads the dtype from the header


def test_weights_that_are_something_else(weights):
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "pointer of Git LFS" in loading_error(weights)
    weights.write_bytes(b"GGUF\x03\0\0\0" * 20)
    assert "is a GGUF file under another name" in loading_error(weights)
    weights.unlink()
    assert "download the model again" in damaged_weights(weights, OSError())
    (weights.parent / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    )
    assert "there is no file" in (said := loading_error(weights)) and "model-00001-of-00001.safetensors" in said


def test_config_json_that_is_cut(folder):
    (folder / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config\.json: .*download it again"):
        read_model_spec(str(folder))


def test_no_tokenizer_files(folder, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert cli.main(["check", str(folder), "--load-format", "dummy", "--device", "cpu", "--log-level", "error"]) == 1
    assert f"tokenizer: there are no tokenizer files in {folder}" in capsys.readouterr().err


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "LlamaTokenizer"])
def test_an_empty_vocabulary(folder, vocabulary):
    if vocabulary == "tokenizer.json":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"] |= {"vocab": {}, "merges": []}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    else:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": vocabulary}))
    with pytest.raises(ValueError, match=r"the vocabulary in .* is empty .*--tokenizer"):
        Tokenizer.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "check"])
def test_it_is_refused_before_anything_is_loaded(tmp_path, command):
    code = f"""
import sys
from quire.cli import main as cli
code = cli.main([{command!r}, {str(tmp_path)!r}, *(["--port", "0"] if {command!r} == "serve" else [])])
assert not {{"transformers", "torch"}} & set(sys.modules), "loaded"
sys.exit(code)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1 and "is empty" in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.count("is empty") == 1, ended.stderr


def test_weights_in_other_files(folder):
    """They are refused before a process is started, and not if no weights are read."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "training_args.bin").write_bytes(b"x")
    check_model_folder(str(folder))
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"x")
    assert "the weights in" in (text := refusal(folder)) and "pytorch_model-00001-of-00002.bin" in text
    check_model_folder(str(folder), needs_weights=False)
    (folder / "model.safetensors").write_bytes(b"x")
    check_model_folder(str(folder))


@pytest.mark.parametrize("model", ["missing.gguf", "folder/missing.GGUF", "./missing.gguf"])
def test_a_gguf_file_that_is_missing(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"there is no file .*missing\.(gguf|GGUF)"):
        hub.local_folder(model)
