"""Renders chat messages to prompt text with the model's Jinja template, as transformers does.

Provides the environment that templates on the Hub expect: an immutable sandbox with `trim_blocks` and `lstrip_blocks`,
`break`/`continue`, `{% generation %}` blocks, a `tojson` that keeps HTML characters, `raise_exception`, `strftime_now`.
Content and tool calls are passed in the form that the template takes (`template_probe.py`).
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from types import TracebackType
from typing import Any

import jinja2
from jinja2 import nodes

from quire.server.parsers import model_json
from quire.server.parsers.json_writer import repaired
from quire.server.text.template_probe import ToolSupport, probe_systems, probe_tools, with_no_content
from quire.server.text.template_sandbox import MAX_CHARS, Limit, Sandbox
from quire.server.values import Json

# same text as in transformers, so that a template that inspects it behaves the same
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
MAX_SECONDS, MAX_OWN_SECONDS = 1.0, 5.0  # of CPU time: for a template sent with a request, and for the model's own
MAX_OWN_CHARS = 2**27  # of output of the model's own template; another writes at most MAX_CHARS
_SHOWN_LINE = 200  # characters of a template's line in an error
_MEDIA_PARTS: dict[str, tuple[dict[str, Any], ...]] = {
    "image": ({"type": "image"}, {"type": "image_url", "image_url": {"url": ""}}),
    "video": ({"type": "video"}, {"type": "video_url", "video_url": {"url": ""}}, {"type": "video", "video": ""}),
}
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # synonyms; templates read the first


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    """Return the compiled template for this text, cached per process.

    Raises ValueError with line and reason if it is not valid Jinja.
    """
    return ChatTemplate(source)


class ChatTemplate:
    """One compiled template. Rendering is thread-safe."""

    def __init__(self, source: str):
        environment = Sandbox(_tojson)
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.source, self._sandbox = source, environment
        try:
            self._template = environment.from_string(source)
            # names that the template reads: it knows a variable if it is among them
            self.names = frozenset(node.name for node in environment.parse(source).find_all(nodes.Name))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: {error.message} (line {error.lineno})") from error
        except Exception as error:  # the compiler's own errors, such as RecursionError for deep nesting
            raise ValueError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from error
        self.accepts_text, self.accepts_parts = self._probe_content()
        self._media_parts: dict[str, dict[str, Any]] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        limited: bool = False,
    ) -> str:
        """Return the prompt for `messages` (plain JSON data). `variables` are further template variables, special
        tokens among them; `limited` says that the template came with a request, for which the limits are stricter.

        Raises ValueError if the template refuses the messages, or if `continue_final_message` cannot continue the last
        one.
        """
        if not messages:
            raise ValueError("messages must not be empty")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be set")
        messages = [
            _alias_reasoning(self._fit_calls(self._fit_content({k: v for k, v in m.items() if v is not None})))
            for m in messages
        ]
        final = None
        if continue_final_message:
            messages, final = self._tag_final(messages)
        variables = {**(variables or {})}
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            if name in variables:
                raise ValueError(f"{name} cannot be a template variable: it has a field of its own")
        variables |= {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run_limited(variables) if limited else self._run_own(variables)
        if model_json.has_half(text):
            raise ValueError("the chat template writes half of a surrogate pair, which is no Unicode text")
        return text if final is None else _cut_at_tag(text, final)

    def _run_limited(self, variables: dict[str, Any]) -> str:
        return self._sandbox.within(MAX_SECONDS, lambda: self._run(variables, MAX_CHARS), trace=True)

    def _run_own(self, variables: dict[str, Any]) -> str:
        return self._sandbox.within(MAX_OWN_SECONDS, lambda: self._run(variables, MAX_OWN_CHARS))

    def _run(self, variables: dict[str, Any], max_chars: int) -> str:
        """Render once. `variables` is one mapping because requests choose the names, which may include "self"."""
        parts, size = [], 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > max_chars:
                    raise Limit(f"the chat template writes more than {max_chars} characters")
                parts.append(part)
            return "".join(parts)
        except Limit:
            raise
        except jinja2.UndefinedError as error:
            raise ValueError(
                f"the chat template needs a value that is missing: {error}{self._where(error.__traceback__)}"
            ) from error
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program: it or its input causes any error
            raise ValueError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
                f"{self._where(error.__traceback__)}"
            ) from error

    def _where(self, traceback: TracebackType | None) -> str:
        """Return the line of the template at which an error arose: Jinja puts it into the traceback."""
        number = None
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == "<template>":
                number = traceback.tb_lineno
            traceback = traceback.tb_next
        lines = self.source.splitlines()
        if number is None or number > len(lines):
            return ""
        return f" (line {number}: {lines[number - 1].strip()[:_SHOWN_LINE]})"

    def _probe_content(self) -> tuple[bool, bool]:
        """Determine whether the template prints content given as text, and content given as a list of parts.

        A template for plain text prints the repr of a list or fails on it; a template for lists iterates over the
        characters of a text and prints none. Both forms are tried on the shortest conversation. If neither renders,
        plain text is assumed.
        """

        def attempt(content: Json) -> str:
            return self._attempt([{"role": "user", "content": content}]) or ""

        text, parts = attempt("qzprobe"), attempt([{"type": "text", "text": "qzprobe"}])
        accepts_parts = "qzprobe" in parts and parts.count("type") <= text.count("type")  # no repr of the dict
        return "qzprobe" in text or not accepts_parts, accepts_parts

    def _attempt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the prompt for a made-up conversation that probes the template; None if it fails."""
        everything = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
            "bos_token": "",
            "eos_token": "",
            **(variables or {}),
        }
        try:
            return self._run_limited(everything)
        except ValueError:
            return None

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Return the template's support for tools and calls."""
        return probe_tools(self._probe, self.source)

    @cached_property
    def takes_systems_anywhere(self) -> bool:
        """Return whether the template prints several system messages, and late ones."""
        return probe_systems(self._probe)

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict] | None) -> str | None:
        return self._attempt([self._fit_content(dict(message)) for message in messages], tools)

    @property
    def content_format(self) -> str:
        """Return vLLM's name of the content format: "openai" for lists of parts, "string" for text only."""
        return "openai" if self.accepts_parts else "string"

    def _fit_content(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its content in the form the template takes; parts are joined by newlines, as
        in vLLM.
        """
        content = message.get("content")
        if isinstance(content, str):
            if not self.accepts_text:
                message["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, (list, tuple)):
            if self.accepts_parts:
                message["content"] = [
                    part if _is_medium(part) else {"type": "text", "text": _part_text(part)} for part in content
                ]
            else:
                message["content"] = "\n".join(_part_text(part) for part in content)
        return message

    def media_part(self, kind: str, placeholder: str) -> dict[str, Any]:
        """Return the part of a message's content for which the template writes the placeholder of an image or a video:
        a text part that holds it, for a template that knows none.
        """
        if placeholder not in self._media_parts:
            for part in _MEDIA_PARTS[kind] if self.accepts_parts else ():
                content = [part, {"type": "text", "text": "qzprobe"}]
                if (self._attempt([{"role": "user", "content": content}]) or "").count(placeholder) == 1:
                    self._media_parts[placeholder] = part
                    break
            else:
                self._media_parts[placeholder] = {"type": "text", "text": placeholder}
        return self._media_parts[placeholder]

    def _fit_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its tool calls, and the id of the call that it answers, in the form the template
        takes.
        """
        calls = message.get("tool_calls")
        if calls:
            support = self.tool_support
            message["tool_calls"] = [self._fit_call(call) for call in calls]
            if "content" not in message:
                message = with_no_content(message, support.no_content)
        call_id = message.get("tool_call_id")
        if call_id is not None and self.tool_support.short_ids:
            message["tool_call_id"] = _short_id(call_id)
        return message

    def _fit_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if self.tool_support.arguments_as_object:
            if isinstance(arguments, str):
                function["arguments"] = _parsed(arguments)
        elif isinstance(arguments, Mapping):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        call = {**call, "function": function}
        if "id" in call and self.tool_support.short_ids:
            call["id"] = _short_id(call["id"])
        return call

    def _tag_final(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Return the messages with a marker after the text of the last one, and that text."""
        last = copy.deepcopy(messages[-1])
        content = last.get("content")
        if content is None:
            raise ValueError("continue_final_message is set, but the last message has no content to continue")
        if "content" not in self.source:
            raise ValueError(
                "continue_final_message is set, but the chat template does not print the messages' content"
            )
        if isinstance(content, str):
            last["content"] = content + _CONTINUE_TAG
            return [*messages[:-1], last], content
        if not content:
            raise ValueError("continue_final_message is set, but the last message has no text to continue")
        part = content[-1]
        if part["type"] != "text":
            raise ValueError("continue_final_message is set, but the last message ends with an image")
        final, part["text"] = part["text"], part["text"] + _CONTINUE_TAG
        return [*messages[:-1], last], final


def _is_medium(part: Json) -> bool:
    """Return whether `part` is one that `media_part` may return."""
    return any(part in parts for parts in _MEDIA_PARTS.values())


def _part_text(part: Json) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"message content of type {kind!r} is not supported: only text parts are")


def _parsed(arguments: str) -> Any:
    """Return the object in the text of a call's arguments. Any other text stays text: a model has written it, and its
    mistake must not end the conversation.
    """
    if not arguments.strip():
        return {}
    try:
        value = model_json.read(repaired(arguments) or arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _short_id(call_id: str) -> str:
    """Return nine letters and digits, the same for the same id."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _cut_at_tag(text: str, final: str) -> str:
    """Return `text` up to the marker.

    If the template stripped the marker's space, it also stripped the trailing space of the message.
    """
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise ValueError(
            "continue_final_message is set, but the chat template does not print the last message as it is"
        )
    position = text.rindex(tag)
    before = text[:position]
    return before if text.startswith(_CONTINUE_TAG, position) else before.rstrip()
