"""Implements `quire rm`, `quire cp` and `quire create`, which remove and name models."""

from __future__ import annotations

import sys
from pathlib import Path

from quire.checkpoints.library import aliases, creation, modelfile, removal
from quire.checkpoints.sizes import format_bytes
from quire.cli.main import Parser
from quire.server.request.preset import check_parameters


def rm(argv: list[str]) -> int:
    """Run `quire rm ARGV...`; returns 1 if one of the models cannot be removed."""
    parser = Parser(
        prog="quire rm",
        description="Remove models of the Hub's cache or of packages, or names by `quire cp`. Files of other programs "
        "are never removed.",
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of `quire list`")
    code = 0
    for model in parser.parse_args(argv).models:
        try:
            what, size = removal.remove(model)
        except (ValueError, OSError) as error:
            print(f"quire rm: error: {error}", file=sys.stderr)
            code = 1
        else:
            print(f"removed {what}" + (f": {format_bytes(size)}" if size else ""))
    return code


def cp(argv: list[str]) -> int:
    """Run `quire cp ARGV...`; returns 1 if there is no such model or the name cannot be kept."""
    parser = Parser(
        prog="quire cp",
        description="Give a model another name, which all commands take. No file is copied. The names are kept in "
        "aliases.json of quire's cache folder; `quire rm NAME` removes one.",
    )
    parser.add_argument("model", metavar="MODEL", help="a model by any name, or its path")
    parser.add_argument("name", metavar="NAME", help="the new name: mine, or mine:small")
    arguments = parser.parse_args(argv)
    try:
        entry = creation.renamed(arguments.model, Path.cwd())
        aliases.add(arguments.name, entry)
    except (ValueError, OSError) as error:
        print(f"quire cp: error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.name} is {entry.base}" + ("" if entry.is_plain else ", with what `quire create` added"))
    return 0


def create(argv: list[str]) -> int:
    """Run `quire create ARGV...`; returns 1 if the Modelfile cannot be read or names a missing file."""
    parser = Parser(
        prog="quire create",
        description="Give a model another name with a system prompt, parameters and adapters, from Ollama's Modelfile: "
        "FROM, SYSTEM, PARAMETER, ADAPTER, MESSAGE, TEMPLATE (in Jinja), LICENSE. No file is copied.",
    )
    parser.add_argument("name", metavar="NAME", help="the new name: mine, or mine:small")
    parser.add_argument("-f", "--file", metavar="FILE", default="Modelfile", help="- is stdin (default: ./Modelfile)")
    arguments = parser.parse_args(argv)
    path = Path(arguments.file).expanduser()
    try:
        data = sys.stdin.buffer.read() if arguments.file == "-" else path.read_bytes()
        entry = modelfile.parse(modelfile.read_bytes(data))
        entry = creation.placed(entry, Path.cwd() if arguments.file == "-" else path.absolute().parent)
        check_parameters(entry.parameters)
        aliases.add(arguments.name, entry)
    except (ValueError, OSError) as error:
        why = f"{arguments.file}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"quire create: error: {why}", file=sys.stderr)
        return 1
    if entry.template and not entry.is_jinja:
        print(f"WARNING {creation.TEMPLATE_NOTE}", file=sys.stderr)
    print(f"{arguments.name} is {entry.base}, with what {arguments.file} says: `quire run {arguments.name}`")
    return 0
