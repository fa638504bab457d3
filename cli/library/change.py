"""`quire rm` and `quire cp`: remove models, and give them names."""

from __future__ import annotations

import os
import sys

from quire.checkpoints.library import aliases, names, removal
from quire.checkpoints.sizes import format_bytes
from quire.cli.main import Parser


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
        target = aliases.aliases().get(arguments.model, arguments.model)
        path = os.path.expanduser(target)
        if os.path.exists(path):
            target = os.path.abspath(path)
        elif target.startswith((".", "/", "~")):
            raise ValueError(f"there is no file or folder {target}")
        else:
            names.located(target)  # a name that is known, but not to be had, is refused
        aliases.add(arguments.name, target)
    except (ValueError, OSError) as error:
        print(f"quire cp: error: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.name} is {target}")
    return 0
