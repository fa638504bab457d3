"""Decide which images workers encode in a step, and whose embeddings they keep.

Workers keep the embeddings of an image by its key until a step tells them to drop it, so this class only counts. An
image is encoded in the step of the first chunk that overlaps its span. Its embeddings are *held* while a running
request has computed a part of the span. Afterwards they stay until others need the room, the least recently used first,
so that a request with the same image, or one that was preempted, finds them again. Dropping them needs no
synchronisation, because workers run steps in order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.worker.messages import MediaItem

if TYPE_CHECKING:
    from quire.engine.request import Request


@dataclass(slots=True)
class _Entry:
    num_embeds: int
    holders: set[Request] = field(default_factory=set)


class EncoderCache:
    """Keeps at most `size` embeddings; a step encodes at most `budget`, or one image that has more."""

    def __init__(self, size: int = 0, budget: int = 0):
        self.size, self.budget = size, budget
        self.num_used = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._encode: dict[str, MediaItem] = {}  # for the next step that is sent
        self._evict: dict[str, None] = {}
        self._needed: set[str] = set()  # keys that the step being scheduled needs
        self._num_encoded = 0  # embeddings among `_encode` that were added for this step

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def usage(self) -> float:
        """Return the fraction of the cache in use, 0 to 1."""
        return self.num_used / self.size if self.size else 0.0

    def start_step(self) -> None:
        """Call this before scheduling a step."""
        self._needed.clear()
        self._num_encoded = 0

    def request(self, item: MediaItem) -> bool:
        """Make the embeddings of an image available in the step being scheduled. Returns False if it must wait for a
        later step: the budget is spent, or other images that are needed fill the cache.
        """
        if item.key not in self._entries:
            if self._num_encoded and self._num_encoded + item.num_embeds > self.budget:
                return False
            if not self._make_room(item.num_embeds):
                return False
            self._entries[item.key] = _Entry(item.num_embeds)
            self._encode[item.key] = item
            self.num_used += item.num_embeds
            self._num_encoded += item.num_embeds
        self._entries.move_to_end(item.key)
        self._needed.add(item.key)
        return True

    def take_step(self) -> tuple[list[MediaItem], list[str]]:
        """Return the images to encode and the keys to drop for the step that is sent now."""
        encode, evict = list(self._encode.values()), list(self._evict)
        self._encode, self._evict = {}, {}
        return encode, evict

    def hold(self, key: str, request: Request) -> None:
        """Keep the embeddings of an image whose span `request` has computed in part."""
        self._entries[key].holders.add(request)

    def release(self, key: str, request: Request) -> None:
        """Undo `hold`. The request may not hold it, and the key may be unknown."""
        if entry := self._entries.get(key):
            entry.holders.discard(request)

    def forget(self, key: str) -> None:
        """Drop an image that could not be encoded, even if it is held. A request that needs the image has it encoded
        again.
        """
        if key in self._entries:
            self._drop(key)

    def _make_room(self, num_embeds: int) -> bool:
        """Drop images until `num_embeds` embeddings fit; drop none and return False if too many are in use."""
        unused = [key for key, entry in self._entries.items() if not entry.holders and key not in self._needed]
        missing, victims = self.num_used + num_embeds - self.size, []
        for key in unused:
            if missing <= 0:
                break
            victims.append(key)
            missing -= self._entries[key].num_embeds
        if missing > 0:
            return False
        for key in victims:
            self._drop(key)
        return True

    def _drop(self, key: str) -> None:
        self.num_used -= self._entries.pop(key).num_embeds
        if self._encode.pop(key, None) is None:  # else no worker has seen it
            self._evict[key] = None
