"""Implements the `quire` command. Flags are derived from the fields of `configs/config.py`; each command imports its
modules when it runs.

This file imports no large module: `quire --help` is instant, and `quire serve` reaches `quire.server.launch.serve` in
a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import select
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.configs.options import Option, all_options, setting_suggestion, suggestion
from quire.configs.peers.reading import Given, is_flag, take
from quire.configs.sources import EMBEDDED_MODEL, Settings, describe, embedded_model, resolve

if TYPE_CHECKING:
    from quire.server.engines.spawn import EarlyEngine

_STDOUT = 1
_OTHER = "--flag-of-another-server"  # stands for one among the arguments
_LIKE_A_MODEL = re.compile(r"[./~].*|[\w.-]+/[\w.-]+(:[\w.-]+|/.+\.gguf)?|.+\.gguf")
SECTIONS = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "parallel": "Parallelism",
    "device": "Device",
    "server": "HTTP server",
    "media": "Images",
    "lora": "LoRA adapters",
    "models": "Several models",
}
EPILOG = (
    "Every flag is also a YAML key for --config (max_model_len: 4096) and an environment variable "
    "(QUIRE_MAX_MODEL_LEN=4096). "
    "A flag overrides the environment, the environment overrides the file."
)


class Parser(argparse.ArgumentParser):
    """Parses arguments without abbreviations, with `_` and `-` equal in flags, with a suggestion for unknown flags, and
    with other servers' flags if `takes_others`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.takes_others = False

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        arguments = [_dashes(arg) for arg in (sys.argv[1:] if args is None else args)]
        others: list[Given] = []
        if self.takes_others:
            arguments = self._without_others(arguments, others)
        result, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            self.unknown(unknown)
        result.others = others
        return result

    def _without_others(self, arguments: list[str], others: list[Given]) -> list[str]:
        """Return the arguments with each flag of other servers replaced by one that ends the values of the flag before
        it. Append the replaced flags to `others`.
        """
        kept, position = [], 0
        while position < len(arguments):
            argument = arguments[position]
            if argument == "--":
                return kept + arguments[position:]
            found = None
            if is_flag(argument) and argument.partition("=")[0] not in self._option_string_actions:
                try:
                    found = take(arguments, position)
                except ValueError as error:
                    self.error(str(error))
            if found is None:
                kept.append(argument)
                position += 1
            else:
                kept.append(_OTHER)
                others.append(found[0])
                position = found[1]
        return kept

    def _get_option_tuples(self, option_string: str) -> list:
        """Refuse abbreviated flags, and flags joined with their value: argparse would take `-hf` for `-h`, and `-m` for
        `-md`.
        """
        return []

    def unknown(self, arguments: list[str]) -> None:
        flag = next((arg.partition("=")[0] for arg in arguments if arg.startswith("-")), None)
        if flag is None:
            self.error(f"unexpected argument {arguments[0]!r}")
        known = [name for name in self._option_string_actions if name.startswith("--") and name != _OTHER]
        self.error(f"unknown flag {flag}{(setting_suggestion if self.takes_others else suggestion)(flag, known)}")

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def _dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


class _HelpAll(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        for action in parser._actions:
            if action.help is argparse.SUPPRESS and hasattr(action, "full_help"):
                action.help = action.full_help
        parser.print_help()
        parser.exit()


class _Extend(argparse._ExtendAction):
    """Remembers the last flag that took several values, because they may have swallowed MODEL."""

    def __call__(self, parser, namespace, values, option_string=None):
        if len(values) > 1:
            namespace.greedy_flag = (option_string, values[-1])
        super().__call__(parser, namespace, values, option_string)


def add_config_flags(
    parser: Parser, *, sections: Sequence[str] = tuple(SECTIONS), everyday: bool = True, several: bool = False
) -> None:
    """Add MODEL, or `several` of them, the flags of `sections`, --config and --print-config. --help shows the everyday
    flags, or none of them if `everyday` is False.
    """
    parser.add_argument(
        "model_arguments" if several else "model_argument",
        nargs="*" if several else "?",
        metavar="MODEL",
        help="folder, GGUF file, Hub id or a name such as llama3.2:1b (default: the small embedded model)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, or a preset: cpu, single-gpu, tp2")
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting with its value and source, and exit"
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all flags and exit")
    for section in sections:
        group = parser.add_argument_group(SECTIONS[section])
        for option in all_options().values():
            if option.section == section:
                _add_flag(group, option, visible=everyday and option.everyday)
    parser.add_argument(_OTHER, action="store_true", help=argparse.SUPPRESS)
    parser.takes_others = True


def _add_flag(group, option: Option, visible: bool) -> None:
    text = _help(option).replace("%", "%%")
    keywords: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": text if visible else argparse.SUPPRESS,
    }
    if option.type is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    else:
        keywords["metavar"] = _metavar(option)
        if option.repeat:
            keywords |= {"action": _Extend, "nargs": "+"}
    group.add_argument(*option.flags, **keywords).full_help = text


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    return option.metavar or {int: "N", float: "X", str: "TEXT"}[option.type]


def _help(option: Option) -> str:
    shown = "default" in option.help or option.default in (None, "", [])
    default = ("on" if option.default else "off") if option.type is bool else option.default
    return option.help if shown else f"{option.help} (default: {default})"


def read_settings(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    *,
    need_model: bool = True,
    shows_warnings: bool = True,
) -> Settings:
    """Return the settings from the parsed `arguments`, the environment and the YAML file. Flags without effect are
    reported on stderr, unless the caller does.

    Exits with 2 and a message if they are invalid.
    """
    given = vars(arguments)
    flags = {name: given[name] for name in all_options() if name in given}
    if given.get("model_arguments"):
        given["model_argument"], *others = given["model_arguments"]
        if others:
            flags["models"] = [*others, *flags.get("models", [])]
    if given.setdefault("model_argument", None) is not None:
        if "model" in flags:
            parser.error("the model is set twice, by MODEL and by --model")
        flags["model"] = given["model_argument"]
    try:
        settings = resolve(flags, given["config"], others=given["others"])
    except ValueError as error:
        parser.error(str(error))
    _refuse_other_sections(parser, settings)
    if not settings.values.get("model"):
        _refuse_swallowed_model(parser, given)
        if not any(settings.values.get(name) for name in ("models", "models_file", "models_dir", "hub_cache")):
            _use_embedded_model(parser, settings, need_model and not given["print_config"])
    elif settings.values["model"] == EMBEDDED_MODEL.name and not os.path.exists(EMBEDDED_MODEL.name):
        settings.values["model"] = embedded_model() or EMBEDDED_MODEL.name
    if given["print_config"]:
        print(describe(settings))
        parser.exit()
    for warning in settings.warnings * shows_warnings:
        print(f"WARNING {warning}", file=sys.stderr)
    return settings


def _refuse_other_sections(parser: argparse.ArgumentParser, settings: Settings) -> None:
    """End with an error if a flag of another server sets a setting that this command does not have."""
    for name, source in settings.sources.items():
        flag = all_options()[name].flag
        if source == "command line" and flag not in parser._option_string_actions:
            parser.error(f"{flag}, which another server's flag sets, has no effect on this command")


def _refuse_swallowed_model(parser: argparse.ArgumentParser, given: dict[str, Any]) -> None:
    flag, value = given.get("greedy_flag", (None, ""))
    if flag is not None and (os.path.exists(os.path.expanduser(value)) or _LIKE_A_MODEL.fullmatch(value)):
        parser.error(f"{flag} took {value!r} as its last value and no MODEL is left; put MODEL first")


def _use_embedded_model(parser: argparse.ArgumentParser, settings: Settings, need_model: bool) -> None:
    if (folder := embedded_model()) is not None:
        for name, value in {"model": folder, "served_model_name": [EMBEDDED_MODEL.name]}.items():
            if name not in settings.values:
                settings.values[name], settings.sources[name] = value, "default (embedded model)"
    elif need_model:
        parser.error("no model: give a folder, a GGUF file or a Hub id, as in `quire serve Qwen/Qwen3-0.6B`")


def serve(arguments: list[str], early: EarlyEngine | None = None) -> int:
    """serve a model over HTTP with OpenAI's API"""
    parser = Parser(
        prog="quire serve",
        usage="quire serve [MODEL...] [flags]",
        description="Serve a model over HTTP with OpenAI's API, or several, each loaded when a request names it.",
        epilog=EPILOG,
    )
    add_config_flags(parser, several=True)
    settings = read_settings(parser, parser.parse_args(arguments), shows_warnings=False)
    config, told = settings.config(), (settings.sources, settings.warnings)
    if early is not None and (config.models.are_several or config.server.headless):
        early.close()
    if config.models.are_several:
        several = importlib.import_module("quire.server.models.launch")
        return importlib.import_module("quire.server.launch").serve(config, *told, several.ModelsLauncher)
    spare = importlib.import_module("quire.server.engines.spare").SpareEngine(early=early)
    try:
        if not config.server.headless:
            # before it starts, because it inherits the limit
            importlib.import_module("quire.server.frontends.descriptors").raise_descriptor_limit()
            spare.prepare(config.parallel)  # imports its packages while this process imports the server's
        launch = importlib.import_module("quire.server.launch")
        return launch.serve(config, *told, spare=spare)
    finally:
        spare.close()


def check(arguments: list[str]) -> int:
    """print the memory plan of `quire serve` with the same flags, and exit"""
    parser = Parser(
        prog="quire check",
        usage="quire check [MODEL...] [flags]",
        epilog=EPILOG,
        description=("Print the memory plan and the automatic choices, without loading weights or serving."),
    )
    add_config_flags(parser, several=True)
    settings = read_settings(parser, parser.parse_args(arguments))
    return importlib.import_module("quire.cli.check").check(settings.config())


def collect_env(arguments: list[str]) -> int:
    """print versions and hardware, for a bug report"""
    Parser(prog="quire collect-env", description="Print versions and hardware, for a bug report.").parse_args(arguments)
    return importlib.import_module("quire.cli.collect_env").main()


def _imported(module: str, function: str, summary: str) -> Callable[[list[str]], int]:
    def run(arguments: list[str]) -> int:
        return getattr(importlib.import_module(module), function)(arguments)

    run.__doc__ = summary
    return run


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": serve,
    "run": _imported("quire.cli.run", "main", "answer a prompt, or chat, with the server of the model or a new one"),
    "list": _imported("quire.cli.library.table", "main", "list the models on this machine"),
    "show": _imported("quire.cli.library.show", "main", "show what a model is, from its files"),
    "pull": _imported("quire.cli.library.pull", "main", "download a model"),
    "cp": _imported("quire.cli.library.change", "cp", "give a model another name"),
    "create": _imported("quire.cli.library.change", "create", "name a model with a system prompt and parameters"),
    "rm": _imported("quire.cli.library.change", "rm", "remove a downloaded model, or a name"),
    "ps": _imported("quire.cli.library.servers", "ps", "list the servers of this user on this machine"),
    "stop": _imported("quire.cli.library.servers", "stop", "stop a server when its requests are finished"),
    "chat": _imported("quire.cli.chat", "chat", "talk to a running server"),
    "complete": _imported("quire.cli.chat", "complete", "complete a text with a running server"),
    "transcribe": _imported("quire.cli.transcribe", "main", "write the text of audio files"),
    "run-batch": _imported(
        "quire.cli.run_batch", "main", "answer the requests of a file, in the format of OpenAI's batches"
    ),
    "bench": _imported("quire.cli.bench.main", "main", "measure a running server, or this machine offline"),
    "health": _imported("quire.cli.health", "main", "report whether a running server is ready, by the exit status"),
    "check": check,
    "quantize": _imported("quire.cli.quantize", "main", "write a model with fewer bits per weight to a folder"),
    "hash-key": _imported("quire.cli.hash_key", "main", "print the hash of an API key, for --api-key-file"),
    "build-kernels": _imported(
        "quire.worker.cpu.build", "main", "compile the native CPU kernels ahead of time, for a wheel or an image"
    ),
    "collect-env": collect_env,
    "completion": _imported("quire.cli.completion", "main", "print the completion script of a shell: bash, zsh, fish"),
}


def main(argv: list[str], early: EarlyEngine | None = None) -> int:
    """Run `quire ARGV...` and return its exit status. `early` may be the engine of `serve`; the caller closes it.

    A reader of the output may close the pipe (`quire check | head`).
    """
    try:
        try:
            return _run(argv, early)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)  # otherwise Python reports the error again at exit
        return 0
    except OSError as error:
        print(f"quire {argv[0]}: error: {error}", file=sys.stderr)
        return 1


def _stdout_is_closed() -> bool:
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: list[str], early: EarlyEngine | None) -> int:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {run.__doc__}" for name, run in COMMANDS.items())
    parser = Parser(
        prog="quire",
        usage="quire COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"An OpenAI-compatible inference server for large language models.\n\ncommands:\n{commands}",
        epilog="`quire COMMAND --help` shows a command's flags.",
    )
    parser.add_argument("--version", action="version", version=f"quire {importlib.import_module('quire').__version__}")
    parser.add_argument("command", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv[:1] or ["--help"])
    command = COMMANDS.get(arguments.command.replace("_", "-"))
    if command is None:
        parser.error(f"unknown command {arguments.command!r}{suggestion(arguments.command, COMMANDS)}")
    return serve(argv[1:], early) if command is serve else command(argv[1:])
