"""What a user's type checker says about the public names."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(util.find_spec("basedpyright") is None, reason="needs basedpyright (the extra `dev`)"),
]

PROGRAM = """
from typing import assert_type

import quire
from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams

params = SamplingParams(temperature=0.5, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="a+"))
with LLM("folder", device="cpu", max_model_len=64) as llm:
    outputs = llm.generate(["a", "b"], params, lora_request=LoRARequest("name", 1, "folder"))
    assert_type(outputs[0].outputs[0].text, str)
    assert_type(outputs[0].outputs[0].token_ids, list[int])
    chats = llm.chat([{"role": "user", "content": "a"}], SamplingParams(n=2))
    assert_type(chats[0].outputs[0].finish_reason, str | None)
    for pooled in llm.embed(["a"]):
        pooled.outputs
assert_type(quire.__version__, str)
"""
WRONG = ("SamplingParams(temperatur=1)", 'LLM("folder").generate(3)', 'LLM("folder").generates("a")')


def check(folder, text: str) -> list[dict]:
    """The errors of `text`."""
    folder.joinpath("program.py").write_text(text)
    folder.joinpath("pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return [one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"]


def test_a_program_with_every_public_name_is_clean(tmp_path):
    assert check(tmp_path, PROGRAM) == []


@pytest.mark.parametrize("line", WRONG)
def test_mistakes_are_found(tmp_path, line):
    (error, *_) = check(tmp_path, f"from quire import LLM, SamplingParams\n\n{line}\n")
    assert error["range"]["start"]["line"] == 2
