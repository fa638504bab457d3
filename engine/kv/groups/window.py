"""Groups whose layers attend to the last tokens, by a window or in chunks (`CacheGroup.first_block`)."""

from __future__ import annotations

from quire.engine.kv.groups.base import GroupBlocks
from quire.engine.kv.pages import NULL_BLOCK
from quire.engine.request import Request


class WindowBlocks(GroupBlocks):
    """Holds the blocks that the next token attends to; older ones are released and replaced by NULL_BLOCK."""

    def first_read(self, num_blocks: int) -> int:
        return self.group.first_block(num_blocks * self.block_size, self.block_size)

    def attach(self, request: Request, ids: list[int]) -> None:
        super().attach(request, ids)
        request.num_given_back[self.g] = ids.count(NULL_BLOCK)

    def release_unread(self, request: Request) -> None:
        ids, given_back = request.block_ids[self.g], request.num_given_back[self.g]
        first = min(self.group.first_block(request.num_computed_tokens, self.block_size), len(ids))
        if first > given_back:
            self.pool.release(ids[given_back:first])
            ids[given_back:first] = [NULL_BLOCK] * (first - given_back)
            request.num_given_back[self.g] = first

    def num_expected(self, request: Request) -> int:
        missing = self.num_to_add(request, request.num_tokens)
        if missing:
            most = self.group.most_blocks(request.num_tokens, self.block_size, self.shared.chunk)
            missing = min(missing, max(most - self.num_held(request), 0))
        return missing + 1
