"""MODEL -> folder, without a network: local folders, a cache in the Hub's own layout, and the library's errors."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest

from quire.checkpoints import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path):
    """A Hub cache that holds one snapshot of org/model."""
    root = tmp_path / "models--org--model"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return tmp_path


def test_local_folder(tmp_path, monkeypatch):
    assert hub.resolve(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert hub.resolve(tmp_path.name) == str(tmp_path)  # a folder wins over a Hub id
    assert hub.resolve(f"./{tmp_path.name}") == str(tmp_path)


@pytest.mark.parametrize("model", ["./none", "/no/such/folder", "~/none-such", "a/b/c", "with space", "../none-such"])
def test_what_can_only_be_a_path_is_refused_at_once(model):
    with pytest.raises(ValueError, match="there is no folder"):
        hub.resolve(model)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        hub.resolve(str(tmp_path / "model.bin"))


def test_offline_cache(cache):
    assert hub.resolve("org/model", download_dir=str(cache)).endswith(COMMIT)
    assert hub.resolve("org/model", download_dir=str(cache), revision=COMMIT).endswith(COMMIT)


def test_offline_and_not_cached(cache):
    with pytest.raises(ValueError, match=r"other/model.*not in the Hugging Face cache, and HF_HUB_OFFLINE is set"):
        hub.resolve("other/model", download_dir=str(cache))
    with pytest.raises(ValueError, match="not in the Hugging Face cache"):
        hub.resolve("org/model", download_dir=str(cache), revision="v2")


def test_download_reports_progress_and_asks_for_needed_files_only(monkeypatch):
    calls, seen = [], []

    def snapshot_download(model, *, tqdm_class, dry_run=False, **options):
        calls.append((model, options))
        if dry_run:
            return [
                SimpleNamespace(filename="a", file_size=900, will_download=True),
                SimpleNamespace(filename="b", file_size=5000, will_download=False),
                SimpleNamespace(filename="c", file_size=100, will_download=True),
            ]
        files, transferred, written = (
            tqdm_class(total=2, desc="Fetching"),
            tqdm_class(total=0, unit="B", unit_scale=True),
            tqdm_class(total=0, unit="B", name="x"),
        )
        for size in (100, 400, 500):
            transferred.update(size // 2)
            written.update(size)
            written.set_description("Reconstructing")
        files.update(2)
        return "/folder"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_files_on_hub", lambda repository, revision: None)
    assert (
        hub.resolve("org/model", revision="v1", download_dir="/cache", progress=lambda *p: seen.append(p)) == "/folder"
    )
    fractions = [fraction for _, fraction in seen]
    assert (
        {phase for phase, _ in seen} == {"downloading"}
        and fractions == sorted(fractions)
        and fractions[0] == 0
        and fractions[-1] == 1
        and 0.5 in fractions
    )
    assert all(options["revision"] == "v1" and options["cache_dir"] == "/cache" for _, options in calls)

    wanted = huggingface_hub.utils.filter_repo_objects
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        "chat_template.json",
        "processor_config.json",
        "additional_chat_templates/tool_use.jinja",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "pytorch_model.bin",
        "original/consolidated.safetensors",
        "consolidated.safetensors",
        "onnx/model.onnx",
        "README.md",
        "onnx/config.json",
        "model.gguf",
    ]
    patterns = {key: calls[-1][1][key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(wanted(names, **patterns)) == names[:12]
    calls.clear()
    hub.resolve("org/model", tokenizer_only=True)
    patterns = {key: calls[-1][1][key] for key in ("allow_patterns", "ignore_patterns")}
    assert "model-00001-of-00002.safetensors" not in list(wanted(names, **patterns))


def _hub_error(name: str):
    return lambda *args, **options: (_ for _ in ()).throw(
        getattr(huggingface_hub.errors, name)("x", response=SimpleNamespace(headers={}, request=None))
    )


@pytest.mark.parametrize(
    "name,message",
    [
        ("GatedRepoError", "gated.*HF_TOKEN"),
        ("RepositoryNotFoundError", "no such model on the Hugging Face Hub"),
        ("RevisionNotFoundError", "has no revision v9"),
    ],
)
def test_errors_say_what_to_do(monkeypatch, name, message):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _hub_error(name))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=message):
        hub.resolve("org/model", revision="v9")


def test_the_library_is_not_imported_for_a_folder(tmp_path):
    code = (
        f"import sys; from quire.checkpoints import hub; hub.resolve({str(tmp_path)!r}); assert 'huggingface_hub' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
