"""System messages where a template takes none. Agents send several at the beginning, and others in the middle of a
conversation, which many templates refuse or leave out.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from quire.server.text.chat_template import ChatTemplate

_ROLES = frozenset({"system", "developer"})


def fit_system_messages(messages: list[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return messages that the template prints: leading system messages are joined into one, and later ones become user
    text in their place, so that the prompt keeps the prefix of the previous turn.
    """
    begin = next((i for i, message in enumerate(messages) if message["role"] not in _ROLES), len(messages))
    rest = messages[begin:]
    is_late = any(message["role"] in _ROLES for message in rest)
    if (begin < 2 and not is_late) or template.takes_systems_anywhere:
        return messages
    out = [reduce(_joined, messages[:begin])] if begin else []
    was_system = False  # whether the last message was a system message
    for message in rest:
        role, is_system = message["role"], message["role"] in _ROLES
        if out and out[-1]["role"] == "user" and (is_system or (was_system and role == "user")):
            out[-1] = _joined(out[-1], message)
        else:
            out.append(message | {"role": "user"} if is_system else message)
        was_system = is_system
    return out


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the first message with the content of both."""
    one, other = first["content"], second["content"]
    if isinstance(one, str) and isinstance(other, str):
        return first | {"content": f"{one}\n\n{other}"}
    return first | {"content": [*_parts(one), {"type": "text", "text": "\n\n"}, *_parts(other)]}


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
