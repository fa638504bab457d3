"""The completion scripts, asked by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from quire.cli import main as cli
from quire.cli.bench.main import COMMANDS as BENCH
from quire.cli.completion import SCRIPTS, all_flags
from quire.configs.options import all_options

# what is typed -> some of the completions, and something that is none
CASES = {
    "ser": ({"serve"}, "chat"),
    "serve --max-model": ({"--max-model-len"}, "--max-num-seqs"),
    "serve --dtype b": ({"bfloat16"}, "float16"),
    "run --temp": ({"--temperature"}, "--top"),
    "health --u": ({"--url"}, "--uds"),
    "bench s": ({"serve", "startup"}, "latency"),
    "bench serve --base": ({"--base-url"}, "--model"),
    "completion ": ({"bash", "fish", "zsh"}, "serve"),
}
ASK = {
    "bash": """
source {script}
COMP_WORDS=(quire {words} "{last}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_quire; printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "fish": """
source {script}
complete -C "quire {typed}" | string split -f1 \\t
""",
    # zsh completes in its line editor alone: stand in for the two builtins that the function calls
    "zsh": """
compadd() {{ [[ $1 == -- ]] && shift; for one in "$@"; do [[ $one == "$PREFIX"* ]] && print -r -- $one; done }}
_files() {{ }}
source {script}
words=(quire {words} "{last}"); CURRENT=$#words; PREFIX="{last}"
_quire
""",
}


def script(shell: str, path, capsys) -> str:
    assert cli.main(["completion", shell]) == 0
    path.write_text(capsys.readouterr().out)
    return str(path)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completions(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    path = script(shell, tmp_path / "script", capsys)
    for typed, (wanted, unwanted) in CASES.items():
        words, _, last = typed.rpartition(" ")
        ask = ASK[shell].format(script=path, typed=typed, words=words, last=last)
        result = subprocess.run([shell, "-c", ask], capture_output=True, text=True, check=False, timeout=30)
        found = set(result.stdout.split())
        assert wanted <= found and unwanted not in found, (typed, result)


def test_every_setting_of_every_command_is_there():
    found = all_flags()
    assert set(found) == {*cli.COMMANDS, *(f"bench {name}" for name in BENCH)}
    of_one_model = {flag for option in all_options().values() if option.section != "models" for flag in option.flags}
    of_several = {flag for option in all_options().values() if option.section == "models" for flag in option.flags}
    for command in ("serve", "check"):
        assert of_one_model | of_several <= set(found[command])
    assert of_one_model <= set(found["run"]) and of_several & set(found["run"]) <= {"--keep-alive"}
    assert found["serve"]["--kv-cache-dtype"] and "--url" in found["chat"] and "--level" in found["build-kernels"]
