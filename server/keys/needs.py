"""Protocols of the server for functions that check which models a key may use and charge its account."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.server.keys.account import Accounts
from quire.server.request.needs import Queue

if TYPE_CHECKING:
    from collections.abc import Sequence


class Names(Protocol):
    """The names of the model, and of its adapters."""

    names: list[str]
    aliases: frozenset[str]

    @property
    def all_names(self) -> list[str]: ...
    def answering(self, name: str | None) -> str: ...
    def display_name(self, name: str | None) -> str: ...
    def require_model(self, name: str | None, known: Sequence[str]) -> None: ...


class Choice(Names, Accounts, Protocol):
    """Parts of the server that decide which models a request may name."""


class Reservation(Queue, Accounts, Protocol):
    """Parts of the server that reserve the room of an accepted request and charge it."""
