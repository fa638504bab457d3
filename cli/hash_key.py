"""Implements `quire hash-key`, which prints the hash of an API key for --api-key-file."""

from __future__ import annotations

import argparse
import getpass
import secrets
import sys
from collections.abc import Sequence

from quire.cli.main import Parser
from quire.server.keys.key import hashed


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="quire hash-key",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print the hash of an API key, for the field `key` of --api-key-file. The key is read from the\n"
        "terminal or from standard input, so that it is in no list of processes.",
    )
    parser.add_argument("key", nargs="?", metavar="KEY", help="the key, instead of reading it (others may see it)")
    parser.add_argument("--new", action="store_true", help="make a random key, and print it and its hash")
    arguments = parser.parse_args(argv)
    if arguments.new:
        if arguments.key is not None:
            parser.error("KEY and --new exclude each other")
        key = "sk-" + secrets.token_urlsafe(32)
        print(key)
    elif arguments.key is not None:
        key = arguments.key
    elif sys.stdin.isatty():
        key = getpass.getpass("API key: ")
    else:
        key = sys.stdin.readline().rstrip("\r\n")
    if not key:
        parser.error("the key is empty")
    print(hashed(key))
    return 0
