"""`quire chat` and `quire complete`: talk to a running OpenAI-compatible server from a terminal, over plain
http.client.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import mimetypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.cli.main import Parser

COMPLETION_TOKENS = 256  # of an answer of `quire complete` without --max-tokens
CHAT_HELP = (
    "/help shows this, /reset clears the conversation, /system TEXT sets the system prompt and clears it, "
    "/image FILE adds an image to the next message, Ctrl-C stops an answer, "
    "Ctrl-D ends"
)


class ServerError(Exception):
    """The server could not be reached or refused the request; the message is for the terminal."""


class Server:
    """The server at a base URL such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, api_key: str | None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"--url: expected http://HOST:PORT/v1, got {url!r}")
        self.url, self.parts = url, parts
        self.path = parts.path.rstrip("/") or "/v1"
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """A response with status 200. Closing it before its end aborts the request on the server.

        Raises ServerError.
        """
        connect = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        connection = connect(self.parts.hostname, self.parts.port)
        try:
            connection.request(method, self.path + path, json.dumps(body) if body is not None else None, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"HTTP {response.status}: {error_message(response.read())}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {error}") from error
        finally:
            connection.close()

    def first_model(self) -> str:
        with self.request("GET", "/models") as response:
            return json.load(response)["data"][0]["id"]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer. Raises ServerError, also for an error event in the stream."""
        with self.request("POST", path, body | {"stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise ServerError(error_message(line[5:]))
                yield chunk


def error_message(body: bytes) -> str:
    """The message of an OpenAI error body, else the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]


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
        default=_default_key(),
        help="API key of the server (default: QUIRE_API_KEY or OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--model", "--model-name", metavar="NAME", help="name of the model (default: the first that the server lists)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum tokens of an answer (default: the server's)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the server's)")
    return parser


def _default_key() -> str | None:
    keys = os.environ.get("QUIRE_API_KEY", "").split(",")  # the server accepts several keys
    return keys[0].strip() or os.environ.get("OPENAI_API_KEY")


def _options(arguments: argparse.Namespace, server: Server) -> dict[str, Any]:
    options = {
        "model": arguments.model or server.first_model(),
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
    }
    return {name: value for name, value in options.items() if value is not None}


def chat(argv: list[str]) -> int:
    """Run `quire chat ARGV...`; returns 1 if the server cannot be reached or refuses."""
    parser = _parser("chat", f"Talk to a running server. {CHAT_HELP}.")
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt of the conversation")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="print the answer to one message and exit")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="image of the first message; may be repeated"
    )
    arguments = parser.parse_args(argv)
    return _guarded(parser, lambda: _chat(arguments))


def _chat(arguments: argparse.Namespace) -> None:
    server = Server(arguments.url, arguments.api_key)
    conversation = Conversation(server, _options(arguments, server), arguments.system_prompt)
    for path in arguments.image:
        conversation.add_image(path)
    if arguments.quick is not None:
        conversation.ask(arguments.quick)
        return
    print(f"{conversation.options['model']} at {server.url}\n{CHAT_HELP}", file=sys.stderr)
    for line in read_lines("> "):
        try:
            conversation.enter(line)
        except ServerError as error:
            print(f"error: {error}", file=sys.stderr)


class Conversation:
    """The messages of a conversation."""

    def __init__(self, server: Server, options: dict[str, Any], system_prompt: str | None = None):
        self.server, self.options, self.system_prompt = server, options, system_prompt
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        if self.system_prompt:
            self.messages.append({"role": "system", "content": self.system_prompt})
        self.images: list[dict[str, Any]] = []  # parts of the next message

    def add_image(self, path: str) -> None:
        """Raises ServerError for a file that cannot be read."""
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ServerError(f"{path}: {error.strerror}") from None
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})

    def enter(self, line: str) -> None:
        """Handle a line from the user: a command or a message."""
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self.reset()
        elif command == "/system":
            self.system_prompt = rest.strip() or None
            self.reset()
        elif command == "/image":
            self.add_image(rest.strip())
            print(f"images of the next message: {len(self.images)}", file=sys.stderr)
        elif command == "/help":
            print(CHAT_HELP, file=sys.stderr)
        elif command.startswith("/") and command[1:].isalpha():
            print(f"unknown command {command}; {CHAT_HELP}", file=sys.stderr)
        elif line.strip():
            self.ask(line)

    def ask(self, message: str) -> None:
        """Print the answer while it arrives. Ctrl-C keeps the part that arrived; an error removes the message and its
        images.
        """
        images, self.images = self.images, []
        content = [*images, {"type": "text", "text": message}] if images else message
        self.messages.append({"role": "user", "content": content})
        answer = ""
        try:
            with stoppable():
                for text in self._answer():
                    answer += text
                    print(text, end="", flush=True)
        except ServerError:
            self.messages.pop()
            raise
        finally:
            print(end="\n" if answer else "", flush=True)
        self.messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> Iterator[str]:
        """The pieces of the answer. What the model thinks before it goes to stderr."""
        thinks = False
        with contextlib.closing(
            self.server.stream("/chat/completions", self.options | {"messages": self.messages})
        ) as chunks:
            for chunk in chunks:
                for choice in chunk.get("choices", ()):
                    delta = choice["delta"]
                    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                        thinks = True
                        print(thought, end="", file=sys.stderr, flush=True)
                    if text := delta.get("content"):
                        print(end="\n\n" if thinks else "", file=sys.stderr, flush=True)
                        thinks = False
                        yield text


def complete(argv: list[str]) -> int:
    """Run `quire complete ARGV...`; returns 1 if the server cannot be reached or refuses."""
    parser = _parser("complete", "Complete a text with a running server. Ctrl-C stops an answer, Ctrl-D ends.")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="print the continuation of one text and exit")
    arguments = parser.parse_args(argv)
    return _guarded(parser, lambda: _complete(arguments))


def _complete(arguments: argparse.Namespace) -> None:
    server = Server(arguments.url, arguments.api_key)
    options = _options(arguments, server)
    if arguments.quick is not None:
        _continue(server, options, arguments.quick)
        return
    for line in read_lines("> "):
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
    note_length(reason, body["max_tokens"])


def note_length(finish_reason: str | None, max_tokens: int | None) -> None:
    """Say that an answer was cut."""
    if finish_reason == "length":
        limit = f"{max_tokens} tokens" if max_tokens else "the server's limit"
        print(f"[stopped at {limit} or the end of the context; --max-tokens sets it]", file=sys.stderr, flush=True)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C ends the block, not the program."""
    try:
        yield
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=sys.stderr, flush=True)


def read_lines(prompt: str) -> Iterator[str]:
    """Lines from the terminal, with editing and history if readline exists, until Ctrl-D; Ctrl-C clears the line.

    Without a terminal: lines of stdin.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # Windows
            import readline  # noqa: F401
    while True:
        try:
            yield input(prompt if interactive else "")
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)", file=sys.stderr)
        except EOFError:
            if interactive:
                print()
            return


def _guarded(parser: Parser, run) -> int:
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
