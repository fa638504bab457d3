"""Protocols of the server for the routes of responses and conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.server.api.needs import Body, Completion, Drain, Names, Preparing, Queue, Settings, Threads, Tokenizing

if TYPE_CHECKING:
    from quire.server.api.openai.responses.service import Responses as ResponseService

__all__ = [
    "Body",
    "Completion",
    "Drain",
    "Names",
    "Preparing",
    "Queue",
    "Responses",
    "Settings",
    "Threads",
    "Tokenizing",
]


class Responses(Protocol):
    """Stored responses and conversations."""

    responses: ResponseService
