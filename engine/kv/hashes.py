"""The hash of each full block of a request: equal hashes mean equal contents.

A block's hash covers every token before it: its parent's hash, its token ids, the images that overlap it and, at the
root of the chain, everything else that the values depend on.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

import msgspec

from quire.engine.request import Request


class BlockHashes:
    """Hashes blocks. With `per_group`, requests share no hash with those of other groups of choices."""

    def __init__(self, block_size: int, per_group: bool = False):
        self.block_size, self.per_group = block_size, per_group

    def extend(self, request: Request, num_full: int) -> None:
        """Hash the request's first `num_full` blocks, each once, chained to the previous block.

        sha256 takes 0.5 us for 16 ids, no slower than blake2b here, and is faster for long blocks.
        """
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), num_full):
            parent = hashes[i - 1] if i else self._root(request)
            content = array("I", request.token_ids[i * size : (i + 1) * size]).tobytes()
            images = self._images(request, i) if request.media else b""
            hashes.append(sha256(parent + content + images).digest())

    def _images(self, request: Request, i: int) -> bytes:
        """Return the inputs of block i besides tokens: the images that overlap it, and their positions. Images of equal
        size have equal placeholders.
        """
        start = i * self.block_size
        items = request.images(start, start + self.block_size)
        return (
            msgspec.msgpack.encode([(item.key, item.offset - start, item.length) for item in items]) if items else b""
        )

    def _root(self, request: Request) -> bytes:
        """Return the start of the hash chain: everything besides tokens that the values depend on."""
        group = request.group if self.per_group else None
        adapters = [(use.key, use.scale) for use in request.adapters]
        return sha256(msgspec.msgpack.encode((request.cache_salt, group, adapters))).digest()
