"""The prompts, conversations and tools that the offline `LLM` takes, as the types of `generate/`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.api.openai.protocol import ContentPart, Message
from quire.server.api.openai.tools import Tools, tools_of
from quire.server.api.openai.translate import template_message
from quire.server.errors import BadRequest
from quire.server.offline.media import media_of_prompt, take_pictures
from quire.server.offline.params import converted
from quire.server.request.limits import ProcessorOptions
from quire.server.request.tools import Tool

Prompt = str | Sequence[int] | dict[str, Any]


def template_messages(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form -> in the form that templates expect. Raises ValueError."""
    if not conversation:
        raise ValueError("messages: a conversation must not be empty")
    messages = []
    for i, fields in enumerate(conversation):
        path = f"messages.{i}"
        content, pictures = take_pictures(fields.get("content"), f"{path}.content")
        fields = fields | ({"content": content} if pictures else {})
        message = converted(fields, Message, f"{path}.")
        _refuse_unknown(fields, Message, path)
        if isinstance(message.content, list):
            for k, part in enumerate(fields["content"]):
                _refuse_unknown(part, ContentPart, f"{path}.content.{k}")
        try:
            out = template_message(message, path)
        except BadRequest as error:
            raise ValueError(error.message) from None
        for k, image in pictures.items():
            out["content"][k] = {"type": "image", "image": image}
        messages.append(out)
    return messages


def checked_options(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Raise ValueError."""
    return None if given is None else converted(given, ProcessorOptions, "mm_processor_kwargs.")


def checked_tools(definitions: Sequence[dict[str, Any]] | None) -> list[Tool]:
    """Return tools in OpenAI's form. Raises ValueError."""
    try:
        return tools_of(converted(list(definitions or ()), Tools, "tools."), None)
    except BadRequest as error:
        raise ValueError(error.message) from None


def _refuse_unknown(fields: dict[str, Any], cls: type[Message] | type[ContentPart], path: str) -> None:
    for name, value in fields.items():
        neutral = name in cls.unsupported and (value is None or value in cls.unsupported[name])
        if name not in cls.__struct_fields__ and name not in cls.harmless and not neutral:
            raise ValueError(f"{path}.{name} is not supported")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and all(isinstance(item, int) for item in prompts) else prompts


def plain(prompts: Prompt | Sequence[Prompt]) -> list[str] | list[list[int]]:
    """Return prompts that are all texts, or all token ids. Raises ValueError."""
    inputs = [plain_and_fields(prompt) for prompt in as_list(prompts)]
    if any(fields["media"] for _, fields in inputs):
        raise ValueError("prompts: images are not supported here, only text")
    plain = [prompt for prompt, _ in inputs]
    if not plain or len({type(prompt) for prompt in plain}) != 1:
        raise ValueError("prompts: give texts, or lists of token ids, at least one; not both")
    return plain


def plain_and_fields(prompt: Prompt) -> tuple[str | list[int], dict[str, Any]]:
    """Return a prompt as text or token ids, and other fields of its spec. Raises ValueError."""
    if not isinstance(prompt, dict):
        return prompt if isinstance(prompt, str) else list(prompt), {"media": []}
    known = {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"}
    if unknown := sorted(set(prompt) - known):
        raise ValueError(f"prompts: unknown key {unknown[0]!r}; a prompt has {', '.join(sorted(known))}")
    given = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(given) != 1:
        raise ValueError("prompts: give exactly one of prompt and prompt_token_ids")
    media = media_of_prompt(prompt)
    if media and not isinstance(given[0], str):
        raise ValueError("prompts: images and videos need a prompt given as text, with a placeholder for each")
    return given[0] if isinstance(given[0], str) else list(given[0]), {
        "cache_salt": prompt.get("cache_salt"),
        "media": media,
        "processor_options": checked_options(prompt.get("mm_processor_kwargs")),
    }
