"""Implements `quire chat` and `quire complete`, which talk to a running OpenAI-compatible server over http.client."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from quire.cli.api_client import Server, ServerError
from quire.cli.conversation import HELP, Conversation
from quire.cli.main import Parser
from quire.cli.prompting import add_answer_flags, answer_options
from quire.cli.terminal import print_truncation, read_lines, read_messages, stoppable

COMPLETION_TOKENS = 256  # per answer of `quire complete` without --max-tokens


def _parser(name: str, description: str) -> Parser:
    parser = Parser(prog=f"quire {name}", description=description)
    parser.add_argument(
        "--url",
        "--base-url",
        metavar="URL",
        default="http://127.0.0.1:8000/v1",
        help="base URL of the server's API (default: http://127.0.0.1:8000/v1)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=default_key(),
        help="API key of the server (default: QUIRE_API_KEY or OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--model", "--model-name", metavar="NAME", help="name of the model (default: the first that the server lists)"
    )
    add_tls_flag(parser)
    add_sampling_flags(parser)
    return parser


def add_tls_flag(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--insecure", action="store_true", help="accept every certificate of a server with TLS, such as its own"
    )


def add_sampling_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum tokens of an answer (default: the server's)"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the server's)")


def add_chat_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--system-prompt", metavar="TEXT", help="system prompt of the conversation")
    group.add_argument("-q", "--quick", metavar="MESSAGE", help="print the answer to one message and exit")
    group.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="image of the first message; may be repeated"
    )
    add_answer_flags(group)


def default_key() -> str | None:
    keys = os.environ.get("QUIRE_API_KEY", "").split(",")  # the server accepts several keys
    return keys[0].strip() or os.environ.get("OPENAI_API_KEY")


def request_options(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    options = {"model": model, "max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    return {name: value for name, value in options.items() if value is not None}


def chat(argv: list[str]) -> int:
    """Run `quire chat ARGV...`; returns 1 if the server cannot be reached or refuses."""
    parser = _parser("chat", f"Talk to a running server. {HELP}.")
    add_chat_flags(parser)
    arguments = parser.parse_args(argv)

    def run() -> None:
        server = Server(arguments.url, arguments.api_key, insecure=arguments.insecure)
        converse(server, server.name_of(arguments.model), arguments, arguments.quick)

    return guarded(parser, run)


def converse(server: Server, model: str, arguments: argparse.Namespace, prompt: str | None) -> None:
    """Hold a conversation until the user ends it, or answer `prompt`. Raises ServerError."""
    options = request_options(arguments, model) | answer_options(arguments)
    conversation = Conversation(server, options, arguments.system_prompt, arguments.verbose, arguments.hidethinking)
    for path in arguments.image:
        conversation.add_image(path)
    if prompt is not None:
        conversation.ask(prompt, once=True)
        return
    if server.makes_no_text(model):
        raise ServerError(f"{model} makes no text: its server answers /v1/embeddings, /v1/rerank or /classify")
    print(f"{model} at {server.url}\n{HELP}", file=sys.stderr)
    for message in read_messages("> "):
        try:
            if not conversation.enter(message):
                return
        except ServerError as error:
            print(f"error: {error}", file=sys.stderr)


def complete(argv: list[str]) -> int:
    """Run `quire complete ARGV...`; returns 1 if the server cannot be reached or refuses."""
    parser = _parser("complete", "Complete a text with a running server. Ctrl-C stops an answer, Ctrl-D ends.")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="print the continuation of one text and exit")
    arguments = parser.parse_args(argv)
    return guarded(parser, lambda: _complete(arguments))


def _complete(arguments: argparse.Namespace) -> None:
    server = Server(arguments.url, arguments.api_key, insecure=arguments.insecure)
    options = request_options(arguments, server.name_of(arguments.model))
    if arguments.quick is not None:
        _continue(server, options, arguments.quick)
        return
    for line in read_lines(lambda: "> "):
        if not line:
            continue
        try:
            _continue(server, options, line)
        except ServerError as error:
            print(f"error: {error}", file=sys.stderr)


def _continue(server: Server, options: dict[str, Any], prompt: str) -> None:
    body = {"max_tokens": COMPLETION_TOKENS} | options | {"prompt": prompt}  # OpenAI's default is 16
    reason = None
    with stoppable(), contextlib.closing(server.stream("/completions", body)) as chunks:
        for chunk in chunks:
            for choice in chunk.get("choices", ()):
                reason = choice.get("finish_reason") or reason
                print(choice["text"], end="", flush=True)
    print(flush=True)
    print_truncation(reason, body["max_tokens"])


def guarded(parser: Parser, run: Callable[[], None]) -> int:
    """Return the exit status of `run`."""
    try:
        run()
    except ServerError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `quire complete -q ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
