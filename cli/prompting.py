"""Reads the prompt of `quire run MODEL "prompt"` from the command line and stdin, and adds flags of `ollama run`."""

from __future__ import annotations

import argparse
import json
import select
import sys
from collections.abc import Sequence
from typing import Any

from quire.cli.api_client import ServerError
from quire.cli.main import Parser

_THINK = ("true", "false", "low", "medium", "high", "max")
SILENT_SECONDS = 2.0  # seconds without a byte of stdin before a note says that the command waits for its end


class PromptParser(Parser):
    """Parses the words after MODEL, and all words after `--`, as the prompt."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.words: list[str] = []

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        arguments, rest = list(sys.argv[1:] if args is None else args), []
        if "--" in arguments:
            place = arguments.index("--")
            arguments, rest = arguments[:place], arguments[place + 1 :]
        result = super().parse_args(_with_value_of_think(arguments), namespace)
        if rest and result.model_argument is None and "model" not in result and not result.url:
            result.model_argument = rest.pop(0)
        result.prompt = " ".join([*self.words, *rest])
        if result.prompt and result.quick is not None:
            self.error("the prompt is given twice, by its words and by --quick")
        return result

    def unknown(self, arguments: list[str]) -> None:
        """Use words as the prompt; a flag among them is an error."""
        if any(word.startswith("-") and " " not in word and len(word) > 1 for word in arguments):
            super().unknown([word for word in arguments if word.startswith("-")])
        self.words += arguments


def _with_value_of_think(arguments: list[str]) -> list[str]:
    """Give a bare `--think` its value: the next word only if it is one of its values."""
    out: list[str] = []
    for word in arguments:
        if out and out[-1] == "--think":
            out[-1] = f"--think={word if word in _THINK else 'true'}"
            if word in _THINK:
                continue
        out.append(word)
    return [*out[:-1], "--think=true"] if out[-1:] == ["--think"] else out


def add_answer_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of `ollama run` that change the request or the output."""
    group.add_argument("--verbose", action="store_true", help="show tokens and times after each answer")
    group.add_argument("--format", type=_format, metavar="json|SCHEMA", help="answer in JSON, of a schema if it is one")
    group.add_argument(
        "--think",
        nargs="?",
        const="true",
        choices=_THINK,
        metavar="|".join(_THINK),
        help="think, or not, or how much (default: the model's)",
    )
    group.add_argument("--hidethinking", "--hide-thinking", action="store_true", help="do not show thoughts")


def add_flags_without_effect(group: argparse._ActionsContainer) -> None:
    group.add_argument("--keepalive", "--keep-alive", metavar="DURATION", help=argparse.SUPPRESS)
    group.add_argument("--nowordwrap", action="store_true", help=argparse.SUPPRESS)  # lines are never wrapped


def warn_without_effect(arguments: argparse.Namespace, ends: bool) -> None:
    """Warn that --keepalive has no effect; `ends`: the server ends with the command."""
    if arguments.keepalive is not None:
        why = "the server of this command ends with it" if ends else "the model stays loaded"
        print(f"WARNING --keepalive: no effect: {why}", file=sys.stderr)


def answer_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of requests that the flags of `add_answer_flags` set."""
    options: dict[str, Any] = {"response_format": arguments.format} if arguments.format else {}
    if arguments.think is not None:
        options["think"] = {"true": True, "false": False}.get(arguments.think, arguments.think)
    return options


def _format(text: str) -> dict[str, Any]:
    if text == "json":
        return {"type": "json_object"}
    try:
        schema = json.loads(text)
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise argparse.ArgumentTypeError(f"expected json or a JSON schema, not {text!r}")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def one_prompt(arguments: argparse.Namespace) -> str | None:
    """Return the prompt to answer once: stdin, if it is no terminal, then the words. None: start a conversation.

    Raises ServerError if there is no text, or stdin has bytes that are not UTF-8.
    """
    if arguments.quick is not None:
        return arguments.quick
    if sys.stdin is None or sys.stdin.isatty():
        return arguments.prompt or None
    text = _stdin_text(bool(arguments.prompt)).rstrip("\r\n")
    parts = [part for part in (text, arguments.prompt) if part.strip()]
    if not parts:
        raise ServerError("stdin has no text and no prompt is given")
    return "\n\n".join(parts)


def _stdin_text(has_prompt: bool) -> str:
    file = getattr(sys.stdin, "buffer", None)
    if file is None:  # tests replace stdin by a text file
        return sys.stdin.read()
    try:
        if has_prompt and not select.select([file], [], [], SILENT_SECONDS)[0]:
            print("reading stdin to its end (`< /dev/null` leaves it out)", file=sys.stderr)
        return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ServerError(f"stdin is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ServerError(f"stdin: {error.strerror}") from None
