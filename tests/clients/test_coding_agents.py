"""Coding agents do a whole task over a server whose model says a script, configured as docs/coding-agents.md prints it:
they read a file, edit it and run a command, by calls in the model's own format.

The programs are looked for in the folders of the variable CODING_AGENTS, for example, with Node 22 or later:
    npm install node@22 @openai/codex @anthropic-ai/claude-code opencode-ai @qwen-code/qwen-code @aaif/goose \
        @continuedev/cli @mariozechner/pi-coding-agent
    CODING_AGENTS=$PWD/node_modules/.bin:$PWD/node_modules/@aaif/goose-binary-linux-x64/bin pytest tests/clients
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_readme import ROOT, blocks
from tests.helpers.engine.scripted_executor import BACKEND, SCRIPT, write_script
from tests.helpers.server.family_templates import GPT_OSS, XML_PARAMETERS
from tests.helpers.server.running import RunningServer, running_server
from tests.helpers.server.scripted import write_folder
from tests.helpers.server.templates import QWEN3_TOOLS
from tests.server.parsers.renderers import RENDERERS

PAGE = (ROOT / "docs" / "coding-agents.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
TEMPLATES = {"hermes": QWEN3_TOOLS, "qwen3_coder": XML_PARAMETERS, "gpt_oss": GPT_OSS}
LENGTH = 262144  # the byte-level tokenizer of the tests needs five times as many tokens as a model's own
FILES = {"colour.txt": "The sky is blue-4711.\n", "check.sh": "tr a-z A-Z < colour.txt\n"}
NUM_PARTS = 12  # of a text that does not fit into the context that the page tells the agents
READ, DONE = "I will read it.", "The sky is green now."
FOUND, SAID, SHOWN = "blue-4711", "green-4711", "GREEN-4711"  # in the file, in the edit, printed by check.sh
PATCH = f"*** Begin Patch\n*** Update File: colour.txt\n@@\n-The sky is {FOUND}.\n+The sky is {SAID}.\n*** End Patch"
BLOCK = f"colour.txt\n```\n<<<<<<< SEARCH\nThe sky is {FOUND}.\n=======\nThe sky is {SAID}.\n>>>>>>> REPLACE\n```\n"
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Agent:
    program: str
    calls: tuple[Call, Call, Call]  # to read, edit and run; PATH is the file's
    formats: tuple[str, ...] = ("hermes", "qwen3_coder")


def shell(name: str, key: str = "command", **more: Any) -> Call:
    return name, {key: "sh check.sh", **more}


def edit(name: str, path: str, old: str, new: str) -> Call:
    return name, {path: "PATH", old: FOUND, new: SAID}


AGENTS = {
    "Codex": Agent(
        "codex",
        (
            ("exec_command", {"cmd": "cat colour.txt"}),
            ("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"}),
            shell("exec_command", "cmd"),
        ),
        ("hermes", "qwen3_coder", "gpt_oss"),
    ),
    "Claude Code": Agent(
        "claude",
        (("Read", {"file_path": "PATH"}), edit("Edit", "file_path", "old_string", "new_string"), shell("Bash")),
    ),
    "opencode": Agent(
        "opencode",
        (
            ("read", {"filePath": "PATH"}),
            edit("edit", "filePath", "oldString", "newString"),
            shell("bash", description="Check"),
        ),
    ),
    "Qwen Code": Agent(
        "qwen",
        (
            ("read_file", {"file_path": "PATH"}),
            edit("edit", "file_path", "old_string", "new_string"),
            shell("run_shell_command", is_background=False),
        ),
    ),
    "goose": Agent(
        "goose", (("shell", {"command": "cat colour.txt"}), edit("edit", "path", "before", "after"), shell("shell"))
    ),
    "Continue": Agent(
        "cn", (("Read", {"filepath": "PATH"}), edit("Edit", "file_path", "old_string", "new_string"), shell("Bash"))
    ),
    "Pi": Agent(
        "pi",
        (
            ("read", {"path": "PATH"}),
            ("edit", {"path": "PATH", "edits": [{"oldText": FOUND, "newText": SAID}]}),
            shell("bash"),
        ),
    ),
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Any]:
    """`servers(name)`: a running server whose model calls tools in the format `name`. Its script is at `script`."""
    script = tmp_path_factory.mktemp("script") / "answers.json"
    running: dict[str, Any] = {}

    def start(name: str) -> RunningServer:
        if name not in running:
            folder = write_folder(tmp_path_factory.mktemp(name), TEMPLATES[name], max_length=LENGTH)
            settings = {"max_model_len": str(LENGTH), "num_gpu_blocks_override": LENGTH // 8}
            context = running_server(
                folder,
                distributed_executor_backend=BACKEND,
                served_model_name=["coder"],
                max_num_batched_tokens=8192,
                **settings,
            )
            running[name] = context, context.__enter__().wait_ready(60)
        return running[name][1]

    start.script = script
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SCRIPT, str(script))
        write_script(script, [])
        yield start
        for context, _ in running.values():
            context.__exit__(None, None, None)


def search_path() -> str:
    return os.pathsep.join(filter(None, (os.environ.get("CODING_AGENTS"), os.environ["PATH"])))


def do_as_printed(title: str, home: Path, work: Path, url: str) -> str:
    """Write the files of a section of the page below `home`, run its command in the folder `work`, and return what it
    prints.
    """
    section = SECTIONS[title].replace("http://127.0.0.1:8000", url)
    for name, text in re.findall(r"`~/([^`]+)`:\n+```\w+\n(.*?)```", section, re.DOTALL):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (command,) = blocks("sh", section)
    kept = {name: os.environ[name] for name in ("LANG", "TERM", "USER") if name in os.environ}
    # without a network, opencode waits long for a list of models that it does not need
    kept |= {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    env = {**kept, "HOME": str(home), "PATH": search_path(), "NO_COLOR": "1"}
    ran = subprocess.run(
        ["bash", "-euc", command], cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=180
    )
    printed = (ran.stdout + ran.stderr).decode("utf-8", "replace")
    assert ran.returncode == 0, printed
    return printed


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """A home, and a folder of work under git with `FILES`."""
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    for name, text in FILES.items():
        (work / name).write_text(text)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "Begin")):
        subprocess.run(["git", *author, *command], cwd=work, check=True)
    return home, work


def num_refused(server: RunningServer) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if re.match(r'http_requests_total\{.*method="POST",status="[45]xx"\}', line)
    )


def require(program: str) -> None:
    if shutil.which(program, path=search_path()) is None:
        pytest.skip(f"{program} is neither in PATH nor in the folders of CODING_AGENTS")


@pytest.mark.slow
@pytest.mark.parametrize("title, format", [(title, each) for title in AGENTS for each in AGENTS[title].formats])
def test_an_agent_reads_edits_and_runs(servers, folders, title, format):
    agent, (home, work) = AGENTS[title], folders
    require(agent.program)
    server, render = servers(format), RENDERERS[format]

    def says(call: Call) -> str:
        name, arguments = call
        path = str(work / "colour.txt")
        return render([(name, {key: path if value == "PATH" else value for key, value in arguments.items()})])

    read, change, run = map(says, agent.calls)
    tool = agent.calls[0][0]  # titles and the like are asked for without tools
    first = (
        f"{READ}\n{read}"
        if format != "gpt_oss"
        else f"<|channel|>analysis<|message|>{READ}<|end|><|start|>assistant{read}"
    )
    last = DONE if format != "gpt_oss" else f"<|channel|>final<|message|>{DONE}"
    answers = [
        ([], "A title."),
        ([tool, "Fix colour.txt"], first),
        ([tool, FOUND], change),
        ([tool, SAID], run),
        ([tool, SHOWN], last),
    ]
    write_script(servers.script, answers)
    refused = num_refused(server)
    printed = do_as_printed(title, home, work, server.url)
    assert (work / "colour.txt").read_text() == f"The sky is {SAID}.\n", printed
    assert DONE in printed and num_refused(server) == refused


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Codex", "Claude Code"])
def test_an_agent_shortens_a_conversation_that_outgrows_the_context_that_it_was_told(servers, folders, title):
    agent, (home, work) = AGENTS[title], folders
    require(agent.program)
    name, arguments = agent.calls[-1]
    (key,) = [key for key, value in arguments.items() if value == "sh check.sh"]
    answers = [([], "All was read, to kiwi-77.")]  # a summary; titles, too, are asked for without tools
    for i in range(NUM_PARTS):
        (work / f"part{i}.txt").write_text("".join(f"{n}: apple-{i}x or pear\n" for n in range(300)))
        says = RENDERERS["hermes"]([(name, arguments | {key: f"cat part{i}.txt"})])
        answers.append(([name, *([f"apple-{i - 1}x"] if i else [])], says))
    answers += [
        ([name, f"apple-{NUM_PARTS - 1}x"], "The conversation was never shortened."),
        (["create a detailed summary"], "<summary>All was read, to kiwi-77.</summary>"),
        (["CONTEXT CHECKPOINT COMPACTION"], "All was read, to kiwi-77."),
        ([name, "kiwi-77"], DONE),
    ]
    write_script(servers.script, answers)
    server = servers("hermes")
    refused = num_refused(server)
    printed = do_as_printed(title, home, work, server.url)
    assert DONE in printed and num_refused(server) == refused, printed


@pytest.mark.slow
def test_aider_writes_and_runs(servers, folders):
    require("aider")
    home, work = folders
    write_script(servers.script, [([], "A title."), (["SEARCH", FOUND], f"I change it.\n\n{BLOCK}")])
    server = servers("hermes")
    refused = num_refused(server)
    printed = do_as_printed("aider", home, work, server.url)
    assert (work / "colour.txt").read_text() == f"The sky is {SAID}.\n", printed
    assert f"THE SKY IS {SHOWN}." in printed and num_refused(server) == refused


def test_every_section_is_run():
    assert SECTIONS.keys() == AGENTS.keys() | {"aider"}
    assert all(len(blocks("sh", section)) == 1 for section in SECTIONS.values())
