"""Items of an input -> messages as templates expect them. One message of the assistant holds the thoughts, the text and
the calls of one answer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.server.api.openai.responses import compaction, foreign_items
from quire.server.api.openai.responses.foreign_items import OWN_TEXT
from quire.server.api.openai.responses.namespaces import joined
from quire.server.api.openai.responses.protocol import TEXT_PARTS, InputItem, InputPart, Screenshot
from quire.server.api.openai.tools import CalledCustom, CalledFunction, MessageToolCall, required, template_call
from quire.server.errors import BadRequest
from quire.server.media.inputs import MediaInput


def opaque(text: str) -> str:
    """Return the `encrypted_content` of thoughts or of a summary. It is not encrypted."""
    return OWN_TEXT + base64.urlsafe_b64encode(text.encode()).decode()


def legible(encrypted_content: str, path: str) -> str:
    """Return the text of `opaque`. Raises BadRequest naming the item if it is damaged."""
    try:
        return base64.urlsafe_b64decode(encrypted_content.removeprefix(OWN_TEXT)).decode()
    except (binascii.Error, UnicodeError):
        where = f"{path}.encrypted_content"
        raise BadRequest(f"{where} is damaged.", param=where) from None


def as_items(given: str | list[InputItem] | None) -> list[InputItem]:
    if isinstance(given, str):
        return [InputItem(role="user", content=given)]
    return given or []


def messages_of(instructions: str | None, items: list[InputItem], param: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation; `param` is the field that holds the items. Raises BadRequest naming the
    item.
    """
    writer = _Writer()
    for i, item in enumerate(items):
        writer.add(item, f"{param}.{i}")
    messages = writer.finish()
    if instructions is None:
        return messages
    if messages and messages[0]["role"] in ("system", "developer"):  # most templates take only one, at the start
        first, *rest = messages
        return [first | {"content": _preceded(instructions, first["content"])}, *rest]
    return [{"role": "system", "content": instructions}, *messages]


def check_items(items: list[InputItem], called: set[str | None], param: str) -> None:
    """Raise BadRequest for invalid items. `called`: the ids of the conversation's earlier calls."""
    writer = _Writer()
    writer.called |= dict.fromkeys(called)
    for i, item in enumerate(items):
        writer.add(item, f"{param}.{i}")


class _Writer:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.thoughts: list[str] = []  # for the answer that follows
        self.called: dict[str | None, str | None] = {}  # the ids by which a call is known -> its id in the messages

    def add(self, item: InputItem, path: str) -> None:
        if foreign_items.is_left_out(item):
            return
        match item.type or "message":
            case "message":
                self._message(item, path)
            case "reasoning":
                self.thoughts.append(_thoughts(item, path))
            case "compaction":
                self.finish()
                self.messages.append(compaction.summary(legible(item.encrypted_content, path)))
            case "function_call":
                function = CalledFunction(
                    name=_name(item, path), arguments=required(item.arguments, f"{path}.arguments")
                )
                self._call(item, MessageToolCall(id=item.call_id, function=function), path)
            case "custom_tool_call":
                custom = CalledCustom(name=_name(item, path), input=required(item.input, path))
                self._call(item, MessageToolCall(id=item.call_id, type="custom", custom=custom), path)
            case "function_call_output" | "custom_tool_call_output":
                content = content_of(required(item.output, f"{path}.output"), f"{path}.output")
                self._output(item, item.call_id, content, path)
            case kind if foreign_items.is_call(kind):
                self._call(item, call := foreign_items.call_of(item), path)
                if (result := foreign_items.result_of(item, path)) is not None:
                    self._output(item, call.id, result, path)
            case kind if kind in foreign_items.OUTPUTS:
                self._output(item, item.call_id or item.id, foreign_items.output_of(item, path), path)
            case other:
                raise BadRequest(
                    f"{path}.type: items of type '{other[:100]}' are not supported by this server.",
                    param=f"{path}.type",
                    code="unsupported_parameter",
                )

    def finish(self) -> list[dict[str, Any]]:
        if self.thoughts:
            self._answer()
        return self.messages

    def _message(self, item: InputItem, path: str) -> None:
        role = required(item.role, f"{path}.role")
        given = required(item.content, f"{path}.content")
        content = content_of(given if isinstance(given, str) else item.parts(), f"{path}.content")
        if role == "assistant":
            self._answer()["content"] = content
            return
        self.finish()
        self.messages.append({"role": role, "content": content})

    def _answer(self) -> dict[str, Any]:
        """Return a new message of the assistant, with the thoughts so far."""
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if self.thoughts:
            message["reasoning_content"] = message["reasoning"] = "\n".join(self.thoughts)
            self.thoughts = []
        self.messages.append(message)
        return message

    def _call(self, item: InputItem, call: MessageToolCall, path: str) -> None:
        call_id = required(call.id, f"{path}.call_id")
        self.called |= dict.fromkeys(foreign_items.called_as(item.type, call_id, item.id), call_id)
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self.thoughts:
            last = self._answer()
        last.setdefault("tool_calls", []).append(template_call(call, path))

    def _output(self, item: InputItem, call_id: str | None, content: str | list[dict[str, Any]], path: str) -> None:
        if required(call_id, f"{path}.call_id") not in self.called:
            raise BadRequest(
                f"{path}.call_id: no call before it has the call_id '{call_id[:100]}'.", param=f"{path}.call_id"
            )
        self.finish()
        self.messages.append({"role": "tool", "tool_call_id": self.called[call_id] or call_id, "content": content})


def _name(item: InputItem, path: str) -> str:
    """Return the name by which the model knows the tool that a call names."""
    return joined(item.namespace, required(item.name, f"{path}.name"))


def _thoughts(item: InputItem, path: str) -> str:
    """Return the text of a reasoning item."""
    if item.content or item.summary:
        name = "content" if item.content else "summary"
        return text_of(getattr(item, name), f"{path}.{name}")
    return legible(item.encrypted_content, path)


Content = str | list[InputPart] | dict[int, InputPart]  # all of several parts, or some by place


def content_of(content: Content | Screenshot, path: str) -> str | list[dict[str, Any]]:
    """Return content as templates expect it: one text, or parts if there are images. Raises BadRequest."""
    if isinstance(content, Screenshot):
        raise BadRequest(f"{path}: expected str | array, got object.", param=path)
    if isinstance(content, str) or not any(part.type == "input_image" for _, part in _placed(content)):
        return text_of(content, path)
    return [
        {"type": "image", "image": _image(part, f"{path}.{i}")}
        if part.type == "input_image"
        else {"type": "text", "text": _text(part, f"{path}.{i}")}
        for i, part in _placed(content)
    ]


def text_of(content: Content, path: str) -> str:
    """Return the text of a content. Raises BadRequest for a part that is no text."""
    if isinstance(content, str):
        return content
    return "".join(_text(part, f"{path}.{i}") for i, part in _placed(content))


def _placed(parts: list[InputPart] | dict[int, InputPart]) -> Iterable[tuple[int, InputPart]]:
    return parts.items() if isinstance(parts, dict) else enumerate(parts)


def _preceded(instructions: str, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return f"{instructions}\n\n{content}"
    return [{"type": "text", "text": f"{instructions}\n\n"}, *content]


def _image(part: InputPart, path: str) -> MediaInput:
    param = f"{path}.image_url"
    detail = "high" if part.detail == "original" else part.detail
    return MediaInput(param=param, url=required(part.image_url, param), detail=detail)


def _text(part: InputPart, path: str) -> str:
    if part.type == "refusal":
        return required(part.refusal, f"{path}.refusal")
    if (kind := required(part.type, f"{path}.type")) not in TEXT_PARTS:
        raise BadRequest(
            f"{path}.type: content of type '{kind[:100]}' is not supported here, only text and input_image.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    return required(part.text, f"{path}.text")


# ---- what is stored

_PREFIXES = {
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "reasoning": "rs",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}


def stored(items: list[InputItem], key: str) -> list[InputItem]:
    """Return the items as listed: with ids, generated from `key` if missing, and content as parts."""
    return [_stored(item, f"{key}i{i}") for i, item in enumerate(items)]


def _stored(item: InputItem, key: str) -> InputItem:
    kind = item.type or "message"
    changes: dict[str, Any] = {"type": kind, "id": item.id or f"{_PREFIXES.get(kind, 'msg')}_{key}"}
    if kind == "message":
        changes["status"] = "completed"
        if isinstance(item.content, str):
            is_output = item.role == "assistant"
            part = InputPart(
                type="output_text" if is_output else "input_text",
                text=item.content,
                annotations=[] if is_output else None,
            )
            changes["content"] = [part]
    return msgspec.structs.replace(item, **changes)
