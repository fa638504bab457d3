"""The code blocks of the documents: programs and curl commands run, commands of quire have flags that exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.configs.options import all_options

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):8000")
SHELLS = ("", "sh", "bash")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block, up to what the shell itself reads."""
        found, text = [], ""
        for line in re.sub(r"\\\n\s*", " ", self.text).splitlines():
            text += line + "\n"
            try:
                words = shlex.split(text, comments=True)
            except ValueError:
                continue  # a quoted text goes on in the next line
            text = ""
            end = next((i for i, word in enumerate(words) if word[0:1] in "|&;<>"), len(words))
            found.append(words[:end])
        return [words for words in found if words]


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.name, line, match[1], match[2]))
    return found


BLOCKS = blocks()
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
WHOLE = [block for block in PROGRAMS if "import OpenAI" in block.text or "import Anthropic" in block.text]
CURLS = [block for block in BLOCKS if block.language in SHELLS and block.text.lstrip().startswith("curl")]
# need a model that reads images, or an adapter
NOT_HERE = ("vision.md", "lora.md", "audio.md")


def test_there_are_blocks_of_each_kind():
    assert len(WHOLE) >= 5 and len(CURLS) >= 4 and len(BLOCKS) > 30
    assert all(block.text.strip() for block in BLOCKS)


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.id)
def test_programs_are_python(block):
    ast.parse(block.text)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "json"], ids=lambda block: block.id)
def test_json_is_json(block):
    json.loads(block.text)


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in WHOLE if b.page not in NOT_HERE], ids=lambda block: block.id)
def test_programs_run(block, embedded_server, tmp_path):
    text = ADDRESS.sub(embedded_server.url.removeprefix("http://"), block.text)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in CURLS if b.page not in NOT_HERE], ids=lambda block: block.id)
def test_curl_commands_are_answered(block, embedded_server):
    text = ADDRESS.sub(embedded_server.url.removeprefix("http://"), block.text)
    command = text.replace("curl ", "curl --silent --show-error --fail-with-body --max-time 60 ")
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and '"error"' not in done.stdout, done.stdout + done.stderr


def flags_of(command: str) -> set[str]:
    """The flags that `quire COMMAND` knows, by its help."""
    words = [sys.executable, "-m", "quire", *command.split(), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", done.stdout))


@pytest.mark.slow
def test_commands_of_quire_have_flags_that_exist():
    serve = {flag for option in all_options().values() for flag in option.flags}
    serve |= {flag.replace("--", "--no-", 1) for flag in serve} | {"--config", "--print-config", "--help-all", "--help"}
    known: dict[str, set[str]] = {"serve": serve, "check": serve}
    wrong = []
    for block in BLOCKS:
        for command in block.commands() if block.language in SHELLS else ():
            if command[0] != "quire":
                continue
            words = command[1:]
            name = " ".join(words[:2]) if words[0] == "bench" else words[0]
            if name not in known:
                known[name] = flags_of(name) | (serve if name in ("run", "run-batch", "bench latency") else set())
            flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            wrong += [f"{block.id}: {flag} of quire {name}" for flag in flags - known[name]]
    assert not wrong and len(known) > 3
