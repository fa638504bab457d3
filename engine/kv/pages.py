"""Facts about each page of the KV cache, by its id: its holders, its key, and whether it is blank."""

from __future__ import annotations

NULL_BLOCK = 0  # never allocated: padding rows read and write it


class Pages:
    """`count` pages, none of them published.

    num_refs > 0              held by that many requests
    num_refs = 0, with key    free, but still found by its key until it is reused
    num_refs = 0              free
    """

    def __init__(self, count: int):
        self.num_refs = [0] * count
        self.keys: list[bytes | None] = [None] * count  # under which a page is published
        self.by_key: dict[bytes, int] = {}
        self.publishers = [-1] * count  # the group of choices that published a page
        # 1 for pages that were never taken, or not since their memory was given back
        self.blank = bytearray(b"\1") * count

    def publish(self, page: int, key: bytes, publisher: int) -> None:
        """Register a page under a key that no page has."""
        self.keys[page], self.by_key[key], self.publishers[page] = key, page, publisher

    def unpublish(self, page: int) -> bytes | None:
        """Unregister a page. Returns its key, None if it had none."""
        key = self.keys[page]
        if key is not None:
            del self.by_key[key]
            self.keys[page] = None
        return key

    def unpublish_all(self) -> None:
        self.keys = [None] * len(self.keys)
        self.by_key.clear()

    def num_free_among(self, pages: list[int]) -> int:
        """Return the number of these pages that no request holds."""
        return list(map(self.num_refs.__getitem__, pages)).count(0)
