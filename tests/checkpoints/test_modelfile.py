"""Ollama's Modelfiles as people write them, and entries made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.checkpoints.library import aliases, creation, modelfile
from quire.checkpoints.library.entries import Entry, from_json, to_json
from tests.helpers.library_stores import isolated_home

WHOLE = """
# a comment
parameter temperature 0.3
FROM llama3.2:1b
PARAMETER stop "<end>"
PARAMETER stop User:
PARAMETER num_ctx 4096
PARAMETER use_mmap true
PARAMETER\ttop_k   7
SYSTEM \"\"\"
You say "no".
# not a comment
FROM here is text
\"\"\"
MESSAGE user Is it \"late\"?
MESSAGE assistant \"\"\"Yes,
it is.\"\"\"
TEMPLATE {{ .Prompt }}
ADAPTER ./lora folder
LICENSE MIT
RENDERER qwen3
"""
ENTRY = Entry(
    "llama3.2:1b", '\nYou say "no".\n# not a comment\nFROM here is text\n', "{{ .Prompt }}",
    {"temperature": 0.3, "stop": ["<end>", "User:"], "num_ctx": 4096, "use_mmap": True, "top_k": 7},
    ("./lora folder",),
    ({"role": "user", "content": 'Is it "late"?'}, {"role": "assistant", "content": "Yes,\nit is."}),
    ("MIT",),
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    return isolated_home(tmp_path, monkeypatch)


def test_every_command():
    assert modelfile.parse(WHOLE) == ENTRY
    assert modelfile.parse(modelfile.render(ENTRY)) == ENTRY
    assert from_json(json.loads(json.dumps(to_json(ENTRY)))) == ENTRY
    indented = "\n    FROM llama3\n    SYSTEM You are Llama3, a model.\n    "  # of an f-string
    assert modelfile.parse(indented) == Entry("llama3", "You are Llama3, a model.")
    quoted = 'FROM "/my models/a.gguf"\r\nSYSTEM "first\r\nsecond"\r\n'
    assert modelfile.parse(quoted) == Entry("/my models/a.gguf", "first\nsecond")
    assert modelfile.parse('FROM x\nSYSTEM "Hi" he said').system == '"Hi" he said'
    assert modelfile.parse("FROM x\nPARAMETER stop 3\nPARAMETER seed 4").parameters == {"stop": ["3"], "seed": 4}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(encoding):
    """PowerShell writes UTF-16, editors of Windows a mark at the start."""
    assert modelfile.parse(modelfile.read_bytes("FROM x\nSYSTEM Grüße".encode(encoding))).system == "Grüße"
    with pytest.raises(ValueError, match="not UTF-8 text"):
        modelfile.read_bytes(b"FROM x\xff")


@pytest.mark.parametrize(
    "text,message",
    [
        ("failed to get console mode\nFROM x", "line 1 of the Modelfile: 'failed' is no command; there are FROM,"),
        ("FROM x\nFROM y", "line 2 of the Modelfile: FROM is given twice"),
        ("SYSTEM x", "has no FROM"),
        ("FROM", "line 1 of the Modelfile: FROM has no value"),
        ('FROM x\nSYSTEM """a\nb', "line 2 of the Modelfile: three quotation marks are not closed"),
        ('FROM x\nSYSTEM """a\nb""" c', "line 3 of the Modelfile: there is text after three"),
        ('FROM x\nSYSTEM """a"""\n\nTrès important', "line 4 of the Modelfile: 'Très' is no command"),
        ("FROM x\nMESSAGE tool x", "line 2 of the Modelfile: MESSAGE needs a role"),
        ("FROM x\nPARAMETER stop", "line 2 of the Modelfile: PARAMETER stop has no value"),
        ("FROM x\nSYSTEM " + "y" * modelfile.MAX_CHARS, "at most"),
    ],
)
def test_errors_name_the_line(text, message):
    with pytest.raises(ValueError, match=message):
        modelfile.parse(text)


def test_paths_and_bases(home):
    (home / "my models").mkdir()
    (home / "my models/a.gguf").write_bytes(b"GGUF")
    (home / "lora").mkdir()
    made = creation.placed(Entry("./my models/a.gguf", adapters=("lora", "org/adapter")), home)
    assert made == Entry(str(home / "my models/a.gguf"), adapters=(str(home / "lora"), "org/adapter"))
    below = Entry("llama3.2:1b", "Be kind.", parameters={"top_k": 3, "top_p": 0.5}, licenses=("MIT",))
    aliases.add("mine", below)
    above = creation.placed(Entry("mine:latest", "Be brief.", parameters={"top_k": 5}), home)
    assert above == Entry("llama3.2:1b", "Be brief.", parameters={"top_k": 5, "top_p": 0.5}, licenses=("MIT",))
    assert creation.renamed("mine", home) == below
    for entry, folder, message in (
        (Entry("./none.gguf"), home, "FROM: there is no file or folder"),
        (Entry("llama3.2:9b"), home, "the tag 9b is not known"),
        (Entry("x", adapters=("./none",)), home, "ADAPTER: there is no file"),
        (Entry("x", adapters=("none",)), home, "neither a path nor the id"),
        (Entry(str(home / "lora")), None, "FROM: a path is taken from `quire create`"),
        (Entry("x", adapters=("/etc",)), None, "ADAPTER: a path is taken from"),
    ):
        with pytest.raises(ValueError, match=message):
            creation.placed(entry, folder)
