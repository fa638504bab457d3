"""The group of layers with recurrent states."""

from __future__ import annotations

from quire.engine.kv.groups.base import GroupBlocks
from quire.engine.kv.pages import NULL_BLOCK
from quire.engine.request import Request


class StateBlocks(GroupBlocks):
    """Holds at most two pages: the next step reads one and writes the other, or the same. A published page is never
    written again, so it is a checkpoint: a request can resume from the prefix that ends at its boundary.
    """

    holds_states = True

    def first_read(self, num_blocks: int) -> int:
        return num_blocks - 1

    def hold(self, found: list[int], num_blocks: int) -> list[int]:
        return [found[num_blocks - 1]]

    def prefix(self, ids: list[int], num_blocks: int) -> list[int]:
        return ids[:1]

    # ---- allocation

    def has_room(self, request: Request, num_tokens: int) -> bool:
        ids = request.block_ids[self.g]
        return len(ids) == 2 and ids[0] == ids[1] and not self._is_checkpoint(ids[1])

    def release_unread(self, request: Request) -> None:
        """Release the page that the last chunk read if the next one needs another: a request never holds three."""
        ids = request.block_ids[self.g]
        if len(ids) == 2 and ids[0] != ids[1] and self._is_checkpoint(ids[1]):
            self._release(ids[:1])
            del ids[0]

    def num_to_add(self, request: Request, num_tokens: int) -> int:
        ids = request.block_ids[self.g]
        return int(len(ids) < 2 or self._is_checkpoint(ids[1]))  # a checkpoint is never overwritten

    def extend(self, request: Request, count: int) -> list[int]:
        """Take `count` pages, 0 or 1. Returns both pages of the request if they changed."""
        ids, added = request.block_ids[self.g], self.pool.take(count, state=True)
        self.shared.checkpoints.forget(added)
        before, read = list(ids), ids[-1] if ids else NULL_BLOCK  # the page that the last chunk wrote, or a checkpoint
        self._release([page for page in ids[:-1] if page != read])
        ids[:] = [read, added[0] if added else read]
        return list(ids) if ids != before else []

    def num_held(self, request: Request) -> int:
        return 0

    def num_expected(self, request: Request) -> int:
        return 0

    def _is_checkpoint(self, page: int) -> bool:
        return page in self.shared.checkpoints.pending or self.pool.is_published(page)

    # ---- publishing and freeing

    def publish(self, request: Request, first: int, num_full: int) -> list[int]:
        """Let the page that the last scheduled chunk writes be a checkpoint if the chunk ends on a block boundary."""
        ids, checkpoints = request.block_ids[self.g], self.shared.checkpoints
        if not checkpoints.tags or len(ids) < 2 or request.num_computed_tokens != num_full * self.block_size:
            return []
        checkpoints.end_chunk(request, ids[1], self.tag + request.block_hashes[num_full - 1], num_full - 1)
        return [ids[1]]

    def release(self, request: Request) -> None:
        self._release(list(dict.fromkeys(request.block_ids[self.g])))

    def _release(self, pages: list[int]) -> None:
        self.pool.release([page for page in pages if page != NULL_BLOCK])
