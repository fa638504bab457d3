"""The sender of a request, and notes of the layers around the routes: the one value of the server's own in an ASGI
scope (`quire.server.http.caller`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quire.server.errors import ApiError
from quire.server.keys.key import Key
from quire.server.request.delta import Delta
from quire.server.request.hints import CacheHint, Ignored


class Queue(Protocol):
    """The server's room for requests that wait."""

    num_reserved: int


class Account(Protocol):
    """`quire.server.keys.account.Account` of an accepted request."""

    def observed(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]: ...
    def close(self, status: int | None) -> None: ...


@dataclass(slots=True)
class Caller:
    """Facts about a request, made by the outermost layer. Each group of fields has one writer, in the order in which
    they run.
    """

    # the connection (`RequestBoundary`), or the runner of batches; the body's or a header's id replaces `request_id`
    request_id: str
    address: str = ""  # for the client
    arrived: float | None = None  # time of the event loop; None without a connection
    background: bool = False  # a line of a batch
    # the API key (`ApiKeys`)
    key: Key | None = None
    owner: str | None = None  # whose files and batches it may see; None: there is one owner
    tenant: str | None = None  # requests of different tenants share no cached prefixes
    # the body (`use_body`)
    hint: CacheHint | None = None
    timeout: float | None = None  # seconds that the client gives it
    ignored: Ignored | None = None  # fields of the body without effect
    # admission, which the end of the answer settles
    priority: int = 0
    num_reserved: int = 0  # choices in `queue`
    queue: Queue | None = None
    account: Account | None = None
    limits: Mapping[str, str] = field(default_factory=dict)  # headers of the answer: limits of the key
    # the error that is the answer, for the access log, because some clients hide it
    refusal: ApiError | None = None

    @property
    def turn(self) -> str:
        """Return the fair-queue key of the request: its API key's owner, or its address if there is at most one key.
        Lines of batches count apart, so that they do not delay other requests of the same key.
        """
        name = self.owner or self.address
        return f"{name}/batch" if self.background else name

    def engine_key(self, key: str) -> str:
        """Return the name of a conversation in the engine: a tenant is hexadecimal, so that names cannot collide."""
        return f"{self.tenant or ''}/{key}"

    def reserve(self, queue: Queue, num_choices: int) -> None:
        """Take room in a queue, which the end of the answer gives back."""
        queue.num_reserved += num_choices
        self.queue, self.num_reserved = queue, num_choices

    def detach(self) -> tuple[int, Account | None]:
        """Take over the reserved choices and the account, which the end of the answer then does not settle."""
        taken = self.num_reserved, self.account
        self.num_reserved, self.account = 0, None
        return taken

    def close(self, status: int | None) -> None:
        """Give back the room in the queue, and settle the account. `status` is the answer's; None if there was none."""
        num_reserved, account = self.detach()
        if self.queue is not None:
            self.queue.num_reserved -= num_reserved
        if account is not None:
            account.close(status)
