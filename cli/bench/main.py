"""Implements `quire bench`, which imports and runs one of COMMANDS."""

from __future__ import annotations

import argparse
import importlib

from quire.cli.main import Parser
from quire.configs.options import suggestion

COMMANDS = {
    "serve": "a running server over HTTP: throughput, time to first token, time per token",
    "audio": "a running server that transcribes: real-time factor, latency",
    "throughput": "the engine without HTTP, all prompts at once",
    "latency": "the engine without HTTP, one batch at a time",
    "startup": "seconds from the command to the first answered probe, readiness and first token",
}


def main(argv: list[str]) -> int:
    """Run `quire bench ARGV...` and return its exit status."""
    commands = "\n".join(f"  {name:<10}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="quire bench",
        usage="quire bench COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Measure a server or this machine.\n\ncommands:\n{commands}",
        epilog="`quire bench COMMAND --help` shows a command's flags.",
    )
    parser.add_argument("command", help=argparse.SUPPRESS)
    command = parser.parse_args(argv[:1] or ["--help"]).command
    if command not in COMMANDS:
        parser.error(f"unknown command {command!r}{suggestion(command, COMMANDS)}")
    return importlib.import_module(f"quire.cli.bench.{command}").main(argv[1:])
