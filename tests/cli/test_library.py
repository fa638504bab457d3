"""`quire list`, `show`, `pull`, `cp` and `rm`: against a local Hub, and stores of other programs in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.cli.main import main
from tests.helpers.library_stores import isolated_home, ollama_model
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.server.fake_hub import FakeHub
from tests.helpers.server.running import poll


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home without models, for commands in this process and in others."""
    monkeypatch.setenv("HF_HOME", str(isolated_home(tmp_path, monkeypatch) / "hf"))
    return tmp_path


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hub")
    build_checkpoint("qwen3", folder / "plain", dtype="bfloat16")
    (folder / "gguf").mkdir()
    for name in ("Q8_0", "F16"):
        write_gguf(folder / "plain", folder / "gguf" / f"m-{name}.gguf", {"default": name}, "qwen3")
    return {"org/plain": str(folder / "plain"), "org/m-GGUF": str(folder / "gguf")}


def quire(hub: FakeHub, home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | hub.environment(home / "hf") | variables
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def listed(capsys) -> dict[str, dict]:
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


@pytest.mark.slow
def test_pull_list_show_and_remove(repositories, home, capsys):
    with FakeHub(repositories).running() as hub:
        for name in ("org/plain", "hf.co/org/m-GGUF:q8_0", "org/m-GGUF:F16"):
            pulled = quire(hub, home, "pull", name)
            assert pulled.returncode == 0 and Path(pulled.stdout.strip(), "config.json").is_file(), pulled
            assert "downloading" in pulled.stderr
        wrong = quire(hub, home, "pull", "org/m-GGUF:Q3_K")
        assert wrong.returncode == 1 and "there are m-F16.gguf, m-Q8_0.gguf" in wrong.stderr
        unknown = quire(hub, home, "pull", "org/none")
        assert unknown.returncode == 1 and "no such model on the Hugging Face Hub" in unknown.stderr
    found = listed(capsys)
    assert set(found) == {"org/plain", "org/m-GGUF/m-Q8_0.gguf", "org/m-GGUF/m-F16.gguf"}
    assert {one["source"] for one in found.values()} == {"Hub cache"}
    file = Path(repositories["org/m-GGUF"], "m-F16.gguf")
    assert found["org/m-GGUF/m-F16.gguf"]["size"] == file.stat().st_size
    assert main(["rm", "org/m-GGUF:F16"]) == 0 and "removed org/m-GGUF/m-F16.gguf" in capsys.readouterr().out
    assert set(listed(capsys)) == {"org/plain", "org/m-GGUF/m-Q8_0.gguf"}
    assert main(["rm", "org/plain", "org/m-GGUF"]) == 0 and not listed(capsys)
    assert not [path for path in (home / "hf").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert main(["rm", "org/plain"]) == 1 and "has no org/plain" in capsys.readouterr().err


@pytest.mark.slow
def test_show_reads_headers_of_the_hub(repositories, home):
    with FakeHub(repositories).running() as hub:
        plain, gguf = (quire(hub, home, "show", name, "--json") for name in ("org/plain", "hf.co/org/m-GGUF:Q8_0"))
    first, second = json.loads(plain.stdout), json.loads(gguf.stdout)
    assert first["architecture"] == second["architecture"] == "Qwen3ForCausalLM"
    assert first["parameters"] == second["parameters"] > 0 and first["context"] == second["context"]
    assert first["chat template"] and "completion" in first["capabilities"]
    assert first["quantization"].startswith("bfloat16") and second["quantization"].startswith("GGUF")
    assert not list((home / "hf").rglob("*.gguf"))


@pytest.mark.slow
def test_a_download_that_breaks_continues(home):
    """The file is larger than two of the pieces in which huggingface_hub writes."""
    folder = home / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    data = os.urandom(25 << 20)
    (folder / "model.safetensors").write_bytes(data)
    name = "model.safetensors"
    with FakeHub({"org/large": str(folder)}).running() as hub:
        hub.cut, hub.checksums = {name}, {name: hashlib.sha256(data).hexdigest()}
        pulled = quire(hub, home, "pull", "org/large")
        assert pulled.returncode == 0 and "SHA-256 of 1 file is right" in pulled.stderr, pulled
        assert not hub.cut and hub.sent[name] < 1.2 * len(data)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_download_that_was_ended_continues(home, end):
    folder, name = home / "large", "model.safetensors"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    data = os.urandom(45 << 20)
    (folder / name).write_bytes(data)
    with FakeHub({"org/large": str(folder)}).running() as hub:
        hub.checksums, hub.held = {name: hashlib.sha256(data).hexdigest()}, {name: threading.Event()}
        environment = os.environ | hub.environment(home / "hf")
        command = [sys.executable, "-m", "quire", "pull", "org/large"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            poll(lambda: [one for one in (home / "hf").rglob("*.part") if one.stat().st_size > 15 << 20], 60)
            process.send_signal(end)
            hub.held.pop(name).set()
            assert process.wait(60) == (130 if end == signal.SIGINT else -end)
        pulled = quire(hub, home, "pull", "org/large")
        assert pulled.returncode == 0 and "SHA-256 of 1 file is right" in pulled.stderr, pulled
        assert hub.sent[name] < 1.8 * len(data)
        (part,) = {path.parent for path in (home / "hf").rglob(hub.checksums[name])}
        assert not list((home / "hf").rglob("*.part"))
        # what an earlier download left is of another file
        (part / hub.checksums[name]).rename(part / f"{hub.checksums[name]}.part")
        with (part / f"{hub.checksums[name]}.part").open("r+b") as file:
            file.write(b"wrong")
            file.truncate(1 << 20)
        again = quire(hub, home, "pull", "org/large")
        assert again.returncode == 1 and "download it again" in again.stderr, again
        assert quire(hub, home, "pull", "org/large").returncode == 0


@pytest.mark.slow
def test_a_damaged_download_is_removed(repositories, home):
    with FakeHub(repositories).running() as hub:
        hub.checksums = {"m-Q8_0.gguf": "0" * 64}
        pulled = quire(hub, home, "pull", "org/m-GGUF:Q8_0")
        assert pulled.returncode == 1 and "m-Q8_0.gguf was damaged on its way" in pulled.stderr, pulled
        assert not list((home / "hf").rglob("*.gguf"))


@pytest.mark.slow
def test_a_pull_goes_through_a_proxy(repositories, home):
    """The Hub of HF_ENDPOINT has no address here: only the proxy reaches it."""
    with FakeHub(repositories).running() as hub:
        through = {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.url, "http_proxy": hub.url}
        pulled = quire(hub, home, "pull", "org/plain", **through)
        assert pulled.returncode == 0 and hub.sent["model.safetensors"], pulled


def test_models_of_other_programs_are_listed_and_never_removed(home, capsys):
    blob = ollama_model(home / ".ollama/models", "registry.ollama.ai/library/llama3.2/1b", b"GGUF" * 100)
    llama_cpp = home / ".cache/llama.cpp/org_name-GGUF_name-Q4_K_M.gguf"
    lm_studio = home / ".lmstudio/models/org/other-GGUF/other-Q8_0.gguf"
    for path in (llama_cpp, lm_studio):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"GGUF" * 50)
    found = listed(capsys)
    assert {(name, one["source"], one["size"]) for name, one in found.items()} == {
        ("llama3.2:1b", "Ollama", 400),
        (str(llama_cpp), "llama.cpp", 200),
        ("org/other-GGUF/other-Q8_0.gguf", "LM Studio", 200),
    }
    for name in (*found, str(blob), "org/name-GGUF:Q4_K_M"):
        assert main(["rm", name]) == 1
        assert "which quire only reads" in capsys.readouterr().err
    assert blob.is_file() and llama_cpp.is_file() and lm_studio.is_file()


def test_own_names(home, capsys):
    folder = home / "models" / "tiny"
    build_checkpoint("qwen3", folder)
    assert main(["cp", str(folder), "mine:small"]) == 0
    assert main(["cp", "mine:small", "again"]) == 0  # of the model itself, not of the name
    assert listed(capsys)["again"]["source"] == f"name of {folder}"
    assert main(["show", "again"]) == 0 and "Qwen3ForCausalLM" in capsys.readouterr().out
    assert main(["check", "mine:small", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["rm", "mine:small"]) == 0 and set(listed(capsys)) == {"again"}
    assert main(["show", "mine:small"]) == 1 and "Looked for it as a path" in capsys.readouterr().err
    for model, name, words in (("./none", "x", "no file or folder"), ("llama3.2:9b", "x", "the tag 9b is not known"),
                               ("org/model", "../x", "cannot be a name")):  # fmt: skip
        assert main(["cp", model, name]) == 1 and words in capsys.readouterr().err
    assert main(["rm", str(folder)]) == 1 and "is a path" in capsys.readouterr().err and folder.is_dir()


def test_the_table_for_people(home, capsys):
    assert main(["list"]) == 0 and capsys.readouterr().out.split() == ["NAME", "SIZE", "MODIFIED", "SOURCE"]
    ollama_model(home / ".ollama/models", "registry.ollama.ai/library/llama3.2/1b", b"GGUF" * 1024)
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "llama3.2:1b", "4.00", "KiB", "under", "a", "minute", "ago", "Ollama",
    ]  # fmt: skip
