"""The models that settings name: the command line, files of quire, llama-swap and llama.cpp, folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.configs.config import Config
from quire.configs.options import all_options
from quire.configs.several import FOREVER, read_duration
from quire.server.models.catalog import read_catalog

OWN = """
models:
  - name: chat
    source: org/chat
    aliases: [fast, small]
    pinned: true
    keep_alive: 10m
    flags: {max_model_len: 4096, n_gpu_layers: 99}
  - source: org/coder
    flags: --max-num-seqs 2 -c 2048 --no-enable-prefix-caching
  - org/third
"""
SWAP = """
healthCheckTimeout: 60
macros:
  base: llama-server --port ${PORT} --host 127.0.0.1
models:
  chat:
    cmd: |
      ${base} -m /models/chat.gguf
      --ctx-size 4096 -ngl 99
    aliases: [gpt-4o-mini]
    ttl: 300
    proxy: http://127.0.0.1:${PORT}
  other:
    cmd: vllm serve org/other --max-model-len 1024
"""
PRESETS = """
version = 1

[*]
ctx-size = 8192
jinja = true

[org/chat-GGUF:Q4_K_M]
n-gpu-layers = 99

[mine]
; a comment
model = /models/mine.gguf
c = 4096
load-on-startup = true
"""


def entries(**settings):
    return read_catalog(Config.from_flat(**settings))


def written(tmp_path, text: str, name: str = "models.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_the_command_line(monkeypatch):
    first, second = entries(model="org/a", models=["org/b"], alias=["fast=org/b"], max_num_seqs=3, keep_alive="5m")
    assert (first.name, second.name, second.aliases) == ("org/a", "org/b", ("fast",))
    assert first.config.scheduler.max_num_seqs == 3 and first.keep_alive == 300
    assert second.config.model.model == "org/b" and second.config.server.served_model_name == ["org/b"]
    assert not second.config.models.are_several


def test_own_file(tmp_path):
    chat, coder, third = entries(models_file=written(tmp_path, OWN), max_num_seqs=7)
    assert (chat.name, chat.aliases, chat.pinned, chat.keep_alive) == ("chat", ("fast", "small"), True, 600)
    assert chat.config.model.max_model_len == "4096" and chat.config.scheduler.max_num_seqs == 7
    assert (coder.name, coder.keep_alive, coder.config.scheduler.max_num_seqs) == ("org/coder", FOREVER, 2)
    assert coder.config.model.max_model_len == "2048" and not coder.config.cache.enable_prefix_caching
    assert third.name == third.source == "org/third" and third.where.endswith("line 11")


def test_llama_swaps_file(tmp_path, caplog):
    chat, other = entries(models_file=written(tmp_path, SWAP))
    assert (chat.name, chat.source, chat.aliases) == ("chat", "/models/chat.gguf", ("gpt-4o-mini",))
    assert chat.config.model.max_model_len == "4096" and chat.keep_alive == 300
    assert (other.name, other.source, other.config.model.max_model_len) == ("other", "org/other", "1024")
    assert "line 6: proxy has no effect" in caplog.text and "line 2: healthCheckTimeout has no effect" in caplog.text


def test_llama_cpps_presets(tmp_path):
    hub, mine = entries(models_file=written(tmp_path, PRESETS, "presets.ini"))
    assert hub.name == hub.source == "org/chat-GGUF:Q4_K_M" and hub.config.model.max_model_len == "8192"
    assert (mine.source, mine.pinned, mine.config.model.max_model_len) == ("/models/mine.gguf", True, "4096")


def test_a_folder_of_models(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text("{}")
    (tmp_path / "seeing").mkdir()
    for name in ("seeing/seeing-Q4_K_M.gguf", "seeing/mmproj-F16.gguf", "one.gguf", "big-00001-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "big-00002-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("")
    found = {entry.name: entry.source for entry in entries(models_dir=str(tmp_path))}
    assert found == {
        "big": str(tmp_path / "big-00001-of-00002.gguf"),
        "checkpoint": str(tmp_path / "checkpoint"),
        "one": str(tmp_path / "one.gguf"),
        "seeing": str(tmp_path / "seeing/seeing-Q4_K_M.gguf"),
    }


def test_what_cannot_be_served_of_a_folder_is_left_out(tmp_path, caplog):
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf")).write_bytes(b"GGUF")
    (tmp_path / "broken.gguf").symlink_to("nowhere.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "loop").symlink_to("loop")
    assert [entry.name for entry in entries(models_dir=str(tmp_path))] == ["one"]
    assert "'\\udcff.gguf' is left out: its name is not UTF-8" in caplog.text
    assert "'broken.gguf' is left out: no file" in caplog.text and "'pipe.gguf' is left out: no file" in caplog.text


def test_a_folder_that_cannot_be_read_is_left_out(tmp_path, caplog, monkeypatch):
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    (tmp_path / "secret").mkdir()
    listed = Path.iterdir

    def iterdir(path):
        if path.name == "secret":  # root may read every folder
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [entry.name for entry in entries(models_dir=str(tmp_path))] == ["one"]
    assert "secret is left out: Permission denied" in caplog.text


def test_a_model_whose_name_is_not_utf8_is_refused():
    with pytest.raises(ValueError, match=r"model: 'a\\udcff' is not UTF-8"):
        all_options()["model"].parse("a\udcff", "model")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("enable-prefix-caching = off", False),
        ("enable-prefix-caching = 1", True),
        ("no-enable-prefix-caching = true", False),
        ("no-enable-prefix-caching = false", True),
    ],
)
def test_a_preset_turns_a_flag_on_or_off(tmp_path, keys, expected):
    (one,) = entries(models_file=written(tmp_path, f"[a]\nmmap = off\nno-repack = 1\nverbose = 0\n{keys}\n"))
    assert one.config.cache.enable_prefix_caching is expected


def test_a_preset_has_aliases(tmp_path):
    (one,) = entries(models_file=written(tmp_path, "[ a ]\nmodel = /m.gguf\nalias = b, c\n"))
    assert (one.name, one.source, one.aliases) == ("a", "/m.gguf", ("b", "c"))


def test_yaml_merges(tmp_path):
    text = "x: &base {cmd: llama-server -m /m.gguf, ttl: 60}\nmodels:\n  a:\n    <<: *base\n    ttl: -1\n  b: *base\n"
    first, second = entries(models_file=written(tmp_path, text), keep_alive="5s")
    assert (first.source, first.keep_alive, second.source, second.keep_alive) == ("/m.gguf", 5, "/m.gguf", 60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("macros: [1]\nmodels: {a: {cmd: llama-server -m x}}\n", "line 1: expected `key: value` lines"),
        ("models:\n  a: {cmd: llama-server -m x, macros: 1}\n", "line 2: expected `key: value` lines"),
        ("models:\n  a: {cmd: llama-server -m}\n", "line 2: cmd names no model"),
        ("models:\n  a: {cmd: llama-server -m 'x}\n", "line 2: No closing quotation"),
        ("models:\n  a: {cmd: llama-server -m x --ctx-size}\n", "line 2: --ctx-size: expected one argument"),
        ("models:\n- source: a\n  flags: \"'4\"\n", "line 3: No closing quotation"),
        ("models:\n- source: !new a\n", "line 2: not valid YAML: could not determine a constructor"),
        ("models:\n- source: a\n  ? [b]\n  : c\n", "line 3: a key must be a text"),
        ("models:\n- ~\n", "line 2: expected `key: value` lines"),
        ("models:\n- source: ''\n", "line 2: the model has no source"),
        ("models:\n- source: a\n  aliases: ['']\n", "line 2: aliases must be a list of names"),
        ("[a]\nmmproj = b.gguf\n", "line 1: --mmproj b.gguf: refused"),
        ("[a]\nenable-prefix-caching = maybe\n", "line 1: enable_prefix_caching: expected"),
        ("models:\n  - source: a\n    sourc: b\n", "line 3: unknown key sourc; did you mean source"),
        ("models:\n  - name: a\n", "line 2: the model has no source"),
        ("models:\n  - source: a\n  - source: a\n", "line 3: the model name a is taken by"),
        ("models:\n  - source: a\n    aliases: [b]\n  - source: b\n", "line 4: the model name b is taken by"),
        ("models:\n  - source: a\n    flags: {port: 1}\n", "line 3: port is no setting of one model"),
        ("models:\n  - source: a\n    flags: {max_model_le: 1}\n", "unknown setting max_model_le"),
        ("models:\n  - source: a\n    flags: --max-num-seqs x\n", "line 3: max_num_seqs: expected"),
        ("models:\n  - source: a\n    keep_alive: soon\n", "line 3: keep_alive: 'soon' is no duration"),
        ("models:\n  - source: a\n    pinned: maybe\n", "pinned must be true or false"),
        ("models:\n  - source: a\nmodel: b\n", "line 3: unknown key model; did you mean models"),
        ("models:\n  - source: [\n", "not valid YAML"),
        ("models:\n  a:\n    cmd: ollama run x\n", "cmd must start llama-server, vllm or quire, not ollama"),
        ("models:\n  a:\n    cmd: llama-server -c 1\n", "line 2: cmd names no model"),
        ("other: 1\n", "there is no list `models`"),
        ("", "it is empty"),
        ("[a]\nctx-siz = 1\n", "line 1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError) as error:
        entries(models_file=written(tmp_path, text))
    assert message in str(error.value)


def test_aliases_of_no_model():
    with pytest.raises(ValueError, match="--alias fast=c: there is no model c; there are a, b"):
        entries(model="a", models=["b"], alias=["fast=c"])
    with pytest.raises(ValueError, match="it must be NAME=MODEL"):
        entries(model="a", models=["b"], alias=["fast"])
    with pytest.raises(ValueError, match="the model name a is taken by the command line"):
        entries(model="a", models=["a"])


def test_durations():
    assert [read_duration(text) for text in ("5m", "1h30m", "0", "90", "-1", "-5m", "1.5s")] == [
        300, 5400, 0, 90, FOREVER, FOREVER, 1.5,
    ]  # fmt: skip
    longest = "2562047h47m16.854775807s"  # of Go; what is longer has no date
    assert [read_duration(one) for one in (longest, "2562048h", 1e300, "9" * 18, 1.5)] == [
        pytest.approx(2**63 / 1e9), FOREVER, FOREVER, FOREVER, 1.5,
    ]  # fmt: skip
    with pytest.raises(ValueError):
        read_duration("5 minutes")


def test_all_engines_are_on_the_machine_of_the_server():
    with pytest.raises(ValueError, match="a server of several models has all engines on its machine"):
        entries(model="org/first", models=["org/second"], data_parallel_size=2, data_parallel_size_local=1)
    assert len(entries(model="org/first", models=["org/second"], data_parallel_size=2)) == 2
