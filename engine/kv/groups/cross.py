"""The group of layers that attend to the output of an encoder."""

from __future__ import annotations

from quire.engine.kv.groups.base import GroupBlocks
from quire.engine.request import Request


class CrossBlocks(GroupBlocks):
    """Holds the blocks of all positions of the encoder's output from a request's first step to its end.

    That step writes them, so a request begins at its first token: it never continues from a cached prefix.
    """

    def first_read(self, num_blocks: int) -> int:
        return 0

    def find(self, hashes: list[bytes]) -> list[int]:
        return []

    def fits(self, found: list[int], longest: int) -> list[bool]:
        return [n == 0 for n in range(longest + 1)]

    # ---- allocation

    def has_room(self, request: Request, num_tokens: int) -> bool:
        return bool(request.block_ids[self.g])

    def num_to_add(self, request: Request, num_tokens: int) -> int:
        return 0 if request.block_ids[self.g] else -(-self.group.window // self.block_size)

    def num_expected(self, request: Request) -> int:
        return self.num_to_add(request, request.num_tokens)

    # ---- publishing

    def publish(self, request: Request, first: int, num_full: int) -> list[int]:
        return []
