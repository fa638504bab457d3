"""Implements `quire completion SHELL`, which prints a completion script made from the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from quire.cli.main import COMMANDS, Parser

_WITH_COMMANDS = "bench"
_ASK = "--flags-for-completion"
Flags = dict[str, list[str]]  # flag -> its choices; empty for a free value


def main(argv: list[str]) -> int:
    """Run `quire completion ARGV...`."""
    parser = Parser(
        prog="quire completion",
        description="Print the completion for a shell: put `source <(quire completion bash)` into ~/.bashrc, the same "
        "with zsh into ~/.zshrc, or `quire completion fish | source` into ~/.config/fish/config.fish.",
    )
    parser.add_argument("shell", choices=sorted(SCRIPTS))
    print(SCRIPTS[parser.parse_args(argv).shell](all_flags()), end="")
    return 0


def all_flags() -> dict[str, Flags]:
    """Return the flags of each command; "bench" has its commands, and "bench serve" the flags of one."""
    from quire.cli.bench.main import COMMANDS as BENCH

    found = {name: _flags(lambda name=name: COMMANDS[name]([_ASK])) for name in COMMANDS if name != "completion"}
    found[_WITH_COMMANDS] = {}
    for name in BENCH:
        found[f"{_WITH_COMMANDS} {name}"] = _flags(lambda name=name: COMMANDS[_WITH_COMMANDS]([name, _ASK]))
    return found | {"completion": {}}


class _Parsing(Exception):
    """Raised instead of parsing `_ASK`."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def _flags(command: Callable[[], int]) -> Flags:
    """Return the flags of the parser to which `command` gives `_ASK`."""
    original = argparse.ArgumentParser.parse_known_args

    def parse(self, args=None, namespace=None):
        if args is not None and list(args) == [_ASK]:
            raise _Parsing(self)
        return original(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse
    try:
        command()
    except _Parsing as found:
        shown = [one for one in found.parser._actions if one.help is not argparse.SUPPRESS or hasattr(one, "full_help")]
        return {flag: _choices(action) for action in shown for flag in action.option_strings}
    finally:
        argparse.ArgumentParser.parse_known_args = original
    raise RuntimeError("the command did not parse its arguments")


def _choices(action: argparse.Action) -> list[str]:
    if action.choices:
        return [str(choice) for choice in action.choices]
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return shown.strip("{}").split(",") if shown.startswith("{") else []


def _cases(flags: dict[str, Flags], with_choices: Callable[[list[str]], str]) -> list[str]:
    """Return the lines of a shell's `case` over "COMMAND FLAG" whose value has choices."""
    return [
        f'    "{command} {flag}") {with_choices(choices)};;'
        for command, found in flags.items()
        for flag, choices in found.items()
        if choices
    ]


def _first_words(flags: dict[str, Flags], command: str) -> list[str]:
    """Return the words that may follow a command before its flags."""
    if command == "completion":
        return sorted(SCRIPTS)
    return [name.partition(" ")[2] for name in flags if name.startswith(f"{command} ")]


def bash(flags: dict[str, Flags]) -> str:
    top = " ".join(COMMANDS)
    choices = "\n".join(_cases(flags, lambda words: f'words="{" ".join(words)}"'))
    names = "\n".join(
        f'      "{command}") words="{" ".join([*_first_words(flags, command), *found])}";;'
        for command, found in flags.items()
    )
    return f"""\
_quire() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{top}" -- "$cur"))
    return
  fi
  [ "$command" = {_WITH_COMMANDS} ] && [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}"
  case "$command $prev" in
{choices}
    *) case "$command" in
{names}
    esac;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _quire quire
"""


def zsh(flags: dict[str, Flags]) -> str:
    choices = "\n".join(_cases(flags, lambda words: f"compadd -- {' '.join(words)}; return"))
    names = "\n".join(f'    "{command}") compadd -- {" ".join(found)};;' for command, found in flags.items() if found)
    firsts = "\n".join(
        f'    "{command}") (( CURRENT == 3 )) && {{ compadd -- {" ".join(words)}; return }};;'
        for command in flags
        if (words := _first_words(flags, command))
    )
    return f"""\
#compdef quire
_quire() {{
  if (( CURRENT == 2 )); then
    compadd -- {" ".join(COMMANDS)}
    return
  fi
  local command=$words[2]
  case "$command" in
{firsts}
  esac
  [[ $command == {_WITH_COMMANDS} ]] && command="$command $words[3]"
  case "$command $words[CURRENT-1]" in
{choices}
  esac
  if [[ $PREFIX != -* ]]; then
    _files
    return
  fi
  case "$command" in
{names}
  esac
}}
if (( $+functions[compdef] )); then compdef _quire quire; fi
"""


def fish(flags: dict[str, Flags]) -> str:
    lines = ["complete -c quire -e"]
    for name, run in COMMANDS.items():
        about = (run.__doc__ or "").replace("'", "\\'")
        lines.append(f"complete -c quire -n __fish_use_subcommand -f -a {name} -d '{about}'")
    for command, found in flags.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.split())
        for word in _first_words(flags, command):
            lines.append(f"complete -c quire -n '{seen}' -f -a {word}")
        for flag, choices in found.items():
            dashes = "-l" if flag.startswith("--") else "-s"
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            lines.append(f"complete -c quire -n '{seen}' {dashes} {flag.lstrip('-')}{values}")
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[dict[str, Flags]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
