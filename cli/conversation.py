"""Holds a conversation in the terminal: messages, the commands that change them, and answers as they arrive."""

from __future__ import annotations

import base64
import contextlib
import json
import mimetypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.cli.api_client import Server, ServerError
from quire.cli.terminal import print_truncation, stoppable
from quire.cli.timings import Timings

HELP = (
    "/help shows this, /reset clears the conversation, /system TEXT sets the system prompt and clears it, "
    "/set NAME VALUE sets a field of requests (/set temperature 0.2; without VALUE back to the default, without NAME "
    'shows all), /image FILE adds an image to the next message, """ begins and ends a message of several lines, '
    "Ctrl-C stops an answer, /bye or Ctrl-D ends"
)
_NOT_SET = ("messages", "stream", "n")  # fields of requests that the conversation itself sets


class Conversation:
    """Holds the messages and options of a conversation."""

    def __init__(
        self,
        server: Server,
        options: dict[str, Any],
        system_prompt: str | None = None,
        verbose: bool = False,
        hides_thoughts: bool = False,
    ):
        self.server, self.options, self.system_prompt = server, options, system_prompt
        self.verbose, self.hides_thoughts = verbose, hides_thoughts
        self.finish_reason: str | None = None  # of the last answer
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        if self.system_prompt:
            self.messages.append({"role": "system", "content": self.system_prompt})
        self.images: list[dict[str, Any]] = []  # parts of the next message

    def add_image(self, path: str) -> None:
        """Add an image to the next message. Raises ServerError for a file that cannot be read."""
        try:
            data = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ServerError(f"{path}: {error.strerror}") from None
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})

    def enter(self, line: str) -> bool:
        """Handle a message or command from the user. False: the conversation ends."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        match command:
            case "/bye" | "/exit" | "/quit":
                return False
            case "/reset" | "/clear":
                self.reset()
            case "/system":
                self.system_prompt = rest or None
                self.reset()
            case "/set":
                self.set(rest)
            case "/image":
                self.add_image(rest)
                print(f"images of the next message: {len(self.images)}", file=sys.stderr)
            case "/help" | "/?":
                print(HELP, file=sys.stderr)
            case _ if command.startswith("/") and command[1:].isalpha() and "\n" not in line:
                print(f"unknown command {command}; {HELP}", file=sys.stderr)
            case _ if line.strip():
                self.ask(line)
        return True

    def set(self, words: str) -> None:
        """Handle `/set NAME VALUE`: VALUE is JSON, or else text. Raises ServerError."""
        name, _, text = words.removeprefix("parameter ").strip().partition(" ")  # Ollama has the word
        name = name.replace("-", "_")
        if name == "num_predict":
            name = "max_tokens"
        if name in _NOT_SET:
            raise ServerError(f"/set: {name} is set by the conversation itself")
        if not name:
            pass
        elif not text.strip():
            if name != "model":
                self.options.pop(name, None)
        else:
            try:
                self.options[name] = json.loads(text)
            except ValueError:
                self.options[name] = text.strip()
        print("fields of requests:", json.dumps(self.options, ensure_ascii=False), file=sys.stderr)

    def ask(self, message: str, once: bool = False) -> None:
        """Print the answer while it arrives. Ctrl-C keeps the part that arrived and is raised if `once`; an error
        removes the message and its images.
        """
        images, self.images = self.images, []
        content = [*images, {"type": "text", "text": message}] if images else message
        self.messages.append({"role": "user", "content": content})
        answer = ""
        try:
            with contextlib.nullcontext() if once else stoppable():
                for text in self._answer():
                    answer += text
                    print(text, end="", flush=True)
        except ServerError:
            self.messages.pop()
            raise
        finally:
            print(end="\n" if answer else "", flush=True)
        self.messages.append({"role": "assistant", "content": answer})
        print_truncation(self.finish_reason, self.options.get("max_tokens"))

    def _answer(self) -> Iterator[str]:
        """Yield the pieces of the answer. The thoughts before it go to stderr."""
        thinks, self.finish_reason, timings = False, None, Timings()
        body = self.options | {"messages": self.messages}
        if self.verbose:
            body["stream_options"] = {"include_usage": True}
        with contextlib.closing(self.server.stream("/chat/completions", body)) as chunks:
            for chunk in chunks:
                timings.observe(chunk)
                for choice in chunk.get("choices", ()):
                    delta = choice["delta"]
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    thought = delta.get("reasoning_content") or delta.get("reasoning")
                    if thought and not self.hides_thoughts:
                        thinks = True
                        print(thought, end="", file=sys.stderr, flush=True)
                    if text := delta.get("content"):
                        print(end="\n\n" if thinks else "", file=sys.stderr, flush=True)
                        thinks = False
                        yield text
        if self.verbose:
            timings.show()
