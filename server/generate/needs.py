"""Protocols of the server for functions that run accepted requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.server.keys.needs import Reservation
from quire.server.request.needs import Encoding, Metrics, Prompting, Settings, Speech

if TYPE_CHECKING:
    from quire.server.engines.handle import EngineHandle
    from quire.server.generate.structures import Structures

__all__ = [
    "Encoding",
    "Generation",
    "Metrics",
    "Prompting",
    "Reservation",
    "Running",
    "Settings",
    "Transcribing",
]


class Running(Reservation, Settings, Protocol):
    """The state needed to run accepted requests for vectors."""

    client: EngineHandle


class Transcribing(Encoding, Running, Speech, Protocol):
    """The state needed to run accepted transcription requests."""


class Generation(Encoding, Running, Protocol):
    """The state needed to run accepted requests for text."""

    structures: Structures
