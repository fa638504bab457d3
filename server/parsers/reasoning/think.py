"""Thoughts in `<think>` ... `</think>`, the format that most families share; and the entries of those families."""

from __future__ import annotations

from quire.server.parsers.reasoning.base import HasToken, ReasoningFormat


def _any(template: str, has_token: HasToken) -> str | None:
    if "</think>" in template:
        return "the chat template has </think>"
    return None


THINK = ReasoningFormat("think", "<think>", "</think>", _any, forced_end="\n</think>\n\n")
