"""The interface of a tier below the KV cache, which keeps the contents of blocks by key, up to a limit in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from quire.configs.config import Config

if TYPE_CHECKING:
    from quire.worker.platforms.base import Platform

GIB = 1 << 30

Content = bytes | Callable[[], bytes]  # for a block; a function is called only if the block is wanted
Changes = deque[tuple[bytes, bool]]  # (key, whether the block is here now), in order


Agree = Callable[[list[int]], list[int]]


def alone(numbers: list[int]) -> list[int]:
    """Return `numbers`: with a single rank, they are the minimum over all ranks."""
    return numbers


@dataclass(frozen=True)
class Rank:
    """The owner of a tier's blocks. `gather` returns the content of a block of the rank's cache; `fingerprint` is that
    of the model and the format, and reads parts of the model's files; `agree` reduces numbers to their minimum over
    all ranks, which call it in the same order.
    """

    config: Config
    gather: Callable[[int], bytes]
    fingerprint: Callable[[], bytes]
    number: int = 0
    num_ranks: int = 1
    agree: Agree = alone
    portable: Callable[[], bytes] = bytes  # as `fingerprint`, also on another machine; reads all of the model's files
    about: Sequence[str] = ()  # facts of the fingerprint, for display


class Tier(Protocol):
    """A storage level below the KV cache. Its class describes the tier; `plan` tells whether the settings ask for it.
    Methods are called in the worker's thread, `contains`, `read` and `touch` also in the read-ahead thread.
    """

    name: ClassVar[str]  # in metrics
    medium: ClassVar[str]  # vLLM's name of the tier, in KV events
    where: ClassVar[str]  # for display
    saves: ClassVar[bool]  # whether hot blocks are written to it before they leave the KV cache, for the next start
    slow: ClassVar[bool] = False  # whether a read may wait, so that those of other tiers must not wait for it

    limit: int = 0  # bytes of this rank
    used: int = 0  # bytes
    changes: Changes | None = None  # since they were taken; None: they are not tracked

    @classmethod
    def plan(cls, config: Config, platform: Platform) -> int | None:
        """Return the bytes that the settings give to all ranks of an engine; None: there is no such tier. Raises
        ValueError for settings that cannot be followed.
        """

    @classmethod
    def open(cls, limit: int, rank: Rank) -> Self:
        """Open the tier of a rank, with `limit` bytes for all ranks. Raises ValueError if that is not possible."""

    def contains(self, keys: list[bytes]) -> list[bool]:
        """Return for each block whether it is here."""

    def read(self, key: bytes) -> bytes | None:
        """Return the content of a block, or None."""

    def offer(self, key: bytes, content: Content, used: int = 0) -> list[tuple[bytes, bytes]] | None:
        """Keep a block, which was last used at `used` ns, 0: now. Returns the (key, content) of blocks
        evicted for it, which may include itself; None: it cannot be taken now.
        """

    def remove(self, keys: list[bytes]) -> None:
        """Forget these blocks."""

    def clear(self) -> None:
        """Forget every block of this model and format."""

    def touch(self, keys: list[bytes]) -> None:
        """Note a use of these blocks, which are in the order of a prefix: its beginning counts as used last."""

    def flush(self, timeout: float) -> bool:
        """Wait until offered blocks are kept and removed ones are erased, at most `timeout` seconds."""
        return True

    def stop(self) -> None:
        """End the tier's threads."""

    def counts(self) -> dict[str, float]:
        """Return totals since the start, by the names of `kv_tier_*` metrics."""
        return {}


def content_of(content: Content) -> bytes:
    return content() if callable(content) else content
