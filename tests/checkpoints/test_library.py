"""Names of models: paths, own names, other programs' stores (fake ones), Ollama's names, and the Hub's."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.checkpoints import hub
from quire.checkpoints.library import aliases, names, ollama_names, stores
from quire.checkpoints.library.applied import entry_of
from quire.checkpoints.library.entries import Entry
from tests.helpers.library_stores import isolated_home, ollama_model


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    return isolated_home(tmp_path, monkeypatch)


def gguf(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF" + path.name.encode())
    return path


@pytest.mark.parametrize("host", ["hf.co/", "huggingface.co/", "https://huggingface.co/", "https://hf.co/"])
@pytest.mark.parametrize("name", ["org/name", "org/name:Q4_K_M", "org/name/file.gguf"])
def test_the_host_of_the_hub_may_be_named(host, name):
    assert names.located(host + name) == name


def test_names_of_ollama_stand_for_files_of_the_hub():
    assert names.located("llama3.2:1b") == "bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0"
    assert names.located("llama3.2") == names.located("llama3.2:latest") == names.located("llama3.2:3b")
    assert names.located("llama3.2:1b-instruct-q4_K_M") == "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
    assert names.located("library/qwen3:0.6b") == "Qwen/Qwen3-0.6B-GGUF:Q8_0"
    with pytest.raises(ValueError, match=r"of llama3.2, the tag 7b is not known here; known: 1b, 3b"):
        names.located("llama3.2:7b")


def test_the_table_is_whole():
    table = ollama_names.table()
    assert len([tag for tags in table.values() for tag in tags if tag != "latest"]) >= 40
    for name, tags in table.items():
        assert tags["latest"] in tags, name
        for tag, target in tags.items():
            assert tag == "latest" or re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w]+)?", target), (name, tag)


def test_an_unknown_name_says_where_it_was_looked_for(home):
    with pytest.raises(ValueError, match="there is no folder nothing:1b") as error:
        hub.resolve("nothing:1b")
    for words in (
        ".ollama/models",
        "llama.cpp",
        ".lmstudio/models",
        "smollm2",
        "quire cp",
        "names of Ollama's library",
    ):
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"there is no folder org/nothing.*HF_HUB_OFFLINE is set.*Looked for it as"):
        hub.resolve("org/nothing", download_dir=str(home))


@pytest.mark.parametrize("variable", [True, False])
def test_ollamas_store(home, monkeypatch, variable):
    root = home / ("elsewhere" if variable else ".ollama/models")
    if variable:
        monkeypatch.setenv("OLLAMA_MODELS", str(root))
    blob = ollama_model(root, "registry.ollama.ai/library/llama3.2/1b", b"GGUF one")
    mine = ollama_model(root, "registry.ollama.ai/user/mine/latest", b"GGUF two")
    from_hub = ollama_model(root, "hf.co/org/name-GGUF/Q4_K_M", b"GGUF three")
    assert names.located("llama3.2:1b") == str(blob)  # before the table's file of the Hub
    assert names.located("user/mine") == names.located("user/mine:latest") == str(mine)
    assert names.located("hf.co/org/name-GGUF:Q4_K_M") == names.located("org/name-GGUF:Q4_K_M") == str(from_hub)
    assert {one.name for one in stores.stored()} == {"llama3.2:1b", "user/mine:latest", "hf.co/org/name-GGUF:Q4_K_M"}
    assert stores.owner(blob) == "Ollama" and stores.owner(home / "x.gguf") is None
    blob.unlink()
    with pytest.raises(ValueError, match=r"Ollama's store lacks .*: run `ollama pull llama3.2:1b`"):
        names.located("llama3.2:1b")


def test_what_ollamas_layers_add(home, monkeypatch):
    kind, root = "application/vnd.ollama.image.", home / ".ollama/models"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy"}]
    layers = {
        kind + "adapter": b"lora", kind + "system": b"Be a pirate.", kind + "license": b"MIT",
        kind + "template": b"{{ .Prompt }}", kind + "params": b'{"temperature": 0.5, "stop": ["x"]}',
        kind + "messages": json.dumps(messages).encode(),
    }  # fmt: skip
    blob = ollama_model(root, "registry.ollama.ai/library/tuned/latest", b"GGUF", layers)
    found = entry_of("tuned")
    assert found == entry_of("library/tuned:latest") or found is not None
    (adapter,) = found.adapters
    assert Path(adapter).read_bytes() == b"lora" and found.base == str(blob)
    assert (found.system, found.template, found.licenses) == ("Be a pirate.", "{{ .Prompt }}", ("MIT",))
    assert found.parameters == {"temperature": 0.5, "stop": ["x"]} and list(found.messages) == messages
    assert entry_of(str(blob)) is None and not found.is_jinja  # the file alone
    own = Entry("tuned", system="Be kind.", parameters={"top_k": 3})
    aliases.add("mine", own)
    both = entry_of("mine:latest")
    assert both.base == "tuned" and both.system == "Be kind." and both.adapters == found.adapters
    assert both.parameters == {"temperature": 0.5, "stop": ["x"], "top_k": 3}
    monkeypatch.chdir(home)
    (home / "tuned").mkdir()
    assert entry_of("tuned") is None and entry_of("mine") == own  # a path goes before everything
    Path(adapter).unlink()
    (home / "tuned").rmdir()
    with pytest.raises(ValueError, match=r"Ollama's store lacks .*, an adapter of tuned:latest"):
        entry_of("tuned")
    ollama_model(root, "registry.ollama.ai/library/plain/latest", b"GGUF2")
    assert entry_of("plain") is None


@pytest.mark.parametrize(
    "value", [3, None, {"system": "x"}, {"base": 1}, {"base": "x", "adapters": "y"}, {"base": "x", "other": 1}]
)
def test_a_damaged_file_of_names(home, value):
    aliases.add("mine", Entry("x"))
    aliases.path().write_text(json.dumps({"mine": value}))
    with pytest.raises(ValueError, match="is damaged: remove it"):
        names.located("mine")


def test_names_given_at_once_are_all_kept(home):
    """By the command line and by a server: each writes the whole file."""
    code = "import sys; from quire.checkpoints.library import aliases, entries; " + (
        "[aliases.add(f'{sys.argv[1]}{i}', entries.Entry('x')) for i in range(40)]"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b", "c")]
    assert [one.wait(60) for one in started] == [0, 0, 0]
    assert len(aliases.entries()) == 120


def test_a_damaged_manifest_is_no_model(home):
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/broken/latest"
    manifest.parent.mkdir(parents=True)
    for text in ("", "[]", "{}", '{"layers": [{}]}', '{"layers": [{"mediaType": "application/vnd.ollama.image.model", '
                 '"digest": "sha256:../../x"}]}'):  # fmt: skip
        manifest.write_text(text)
        assert stores.find("broken") is None and not list(stores.stored())


def test_llama_cpps_cache(home, monkeypatch):
    first = gguf(home / ".cache/llama.cpp/org_name-GGUF_name-Q4_K_M.gguf")
    gguf(home / ".cache/llama.cpp/org_name-GGUF_mmproj-name-Q4_K_M.gguf")
    shard = gguf(home / ".cache/llama.cpp/org_name-GGUF_Q8_0_name-Q8_0-00001-of-00002.gguf")
    gguf(home / ".cache/llama.cpp/org_name-GGUF_Q8_0_name-Q8_0-00002-of-00002.gguf")
    assert names.located("org/name-GGUF:q4_k_m") == str(first)
    assert names.located("org/name-GGUF/name-Q4_K_M.gguf") == str(first)
    assert names.located("org/name-GGUF:Q8_0") == names.located(
        "org/name-GGUF/Q8_0/name-Q8_0-00001-of-00002.gguf") == str(shard)  # fmt: skip
    assert names.located("org/name-GGUF") == "org/name-GGUF"  # two files: the Hub's default is another question
    assert names.located("org/name-GGUF:Q2_K") == "org/name-GGUF:Q2_K"
    assert [one.path for one in stores.stored()] == [shard, first]
    monkeypatch.setenv("LLAMA_CACHE", str(home / "none"))
    assert names.located("org/name-GGUF:Q4_K_M") == "org/name-GGUF:Q4_K_M"


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studios_folder(home, root):
    file = gguf(home / root / "org/name-GGUF/name-Q4_K_M.gguf")
    for name in ("org/name-GGUF:Q4_K_M", "org/name-GGUF", "org/name-GGUF/name-Q4_K_M.gguf"):
        assert names.located(name) == str(file)
    assert [one.name for one in stores.stored()] == ["org/name-GGUF/name-Q4_K_M.gguf"]
    (home / ".cache/huggingface/hub/models--org--name-GGUF/snapshots").mkdir(parents=True)
    assert names.located("org/name-GGUF") == "org/name-GGUF"  # the same id, as downloaded from the Hub


def test_a_path_goes_before_everything(home, monkeypatch):
    ollama_model(home / ".ollama/models", "registry.ollama.ai/library/llama3.2/latest", b"GGUF")
    monkeypatch.chdir(home)
    (home / "llama3.2").mkdir()
    assert names.located("llama3.2") == "llama3.2"


def test_a_folder_of_gguf_files(home):
    one = gguf(home / "models/a-Q4_K_M.gguf")
    assert names.located(str(home / "models")) == str(one)
    two = gguf(home / "models/a-Q8_0.gguf")
    assert names.located(str(home / "models")) == str(home / "models")  # which one is not known
    assert names.located(f"{home}/models:q8_0") == str(two)
    with pytest.raises(ValueError, match=r"models:Q5_0 must name one GGUF file of its folder; it names none; there are "
                       r"a-Q4_K_M.gguf, a-Q8_0.gguf"):  # fmt: skip
        names.located(f"{home}/models:Q5_0")


def test_own_names(home):
    file = gguf(home / "models/a-Q4_K_M.gguf")
    aliases.add("mine", Entry(str(file)))
    aliases.add("small:1b", Entry("llama3.2:1b"))
    assert names.located("mine") == str(file)
    assert names.located("small:1b") == "bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0"
    for wrong in ("../x", "a/b/c", "", "a:b:c", "-x", "."):
        with pytest.raises(ValueError, match="cannot be a name"):
            aliases.add(wrong, Entry("x"))
    file.unlink()
    with pytest.raises(ValueError, match=r"mine is your name for .*, which is gone: `quire rm mine`"):
        names.located("mine")
    assert aliases.remove("mine") and not aliases.remove("mine")
    aliases.path().write_text("[")
    with pytest.raises(ValueError, match="is damaged: remove it"):
        names.located("mine")


def test_a_servers_name_of_the_same_model():
    listed = ["org/name:Q4_K_M", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0"]
    assert names.same_model("hf.co/org/name:q4_k_m", listed) == listed[0]
    assert names.same_model("llama3.2:1b", listed) == listed[1]
    assert names.same_model("other", listed) == "other"
    aliases.add("copy", Entry("llama3.2:1b"))
    aliases.add("pirate", Entry("llama3.2:1b", system="Be a pirate."))
    assert names.same_model("copy", listed) == listed[1]
    assert names.same_model("pirate", listed) == "pirate"  # it answers otherwise than its base
    assert names.same_model("pirate:latest", [*listed, "pirate"]) == "pirate"


def test_what_a_manifest_names_is_its_digest(home):
    """The fake store is one as Ollama writes it: files are named by their digest."""
    blob = ollama_model(home / "s", "registry.ollama.ai/library/a/latest", b"GGUF")
    assert blob.name == f"sha256-{hashlib.sha256(b'GGUF').hexdigest()}"
    assert json.loads((home / "s/manifests/registry.ollama.ai/library/a/latest").read_text())["schemaVersion"] == 2
