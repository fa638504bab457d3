"""Blocks of prompts that are sent to other servers, or fetched from them.

A request that sends leaves its full blocks to the workers, which copy them between steps; the blocks are held
meanwhile. A request that receives tells the workers which keys another server has: `tiers.py` fetches them like those
of a disk. Numbers of blocks, and not ids, name them between servers: the receiver hashes the same tokens.
"""

from __future__ import annotations

from collections import deque

from quire.configs.kv_transfer import KVTransferSettings
from quire.engine.kv.manager import KVCacheManager
from quire.engine.messages import Transfer
from quire.engine.request import Request
from quire.worker.messages import TransferCalls


class Transfers:
    """`calls` are those of the workers' tier "remote"."""

    def __init__(self, kv: KVCacheManager, calls: TransferCalls, settings: KVTransferSettings):
        self.kv, self._calls, self._settings = kv, calls, settings
        self._held: deque[list[int]] = deque()  # blocks of each call of `send` that is not done
        self._num_done = 0

    @property
    def busy(self) -> bool:
        """Return whether blocks are being copied."""
        return bool(self._held)

    def send(self, request: Request, unsettled: set[int]) -> Transfer | None:
        """Have the blocks of a request that ends copied, except for those that a step in flight fills. Returns where
        another server finds them; None if this one does not send.
        """
        if not self._settings.sends:
            return None
        self.kv.checkpoints.publish()  # the state at the prompt's end, if its step was scheduled last
        num_blocks = self.kv.match(request).num_blocks
        hashes = {one: i for i, one in enumerate(request.block_hashes[:num_blocks])}
        found = [one for one in self.kv.cached_blocks(request, num_blocks) if one[0] not in unsettled]
        numbers: list[list[int]] = [[] for _ in self.kv.by_group]
        for _, key in found:
            numbers[key[0]].append(hashes[key[1:]])
        if found:
            held = [block_id for block_id, _ in found]
            self.kv.pool.share(held)
            self._held.append(held)
            self._calls.send(found)
        return Transfer(True, self._settings.host, self._settings.port, numbers)

    def poll(self) -> None:
        """Continue the copies, and release the blocks of those that are done."""
        num_done = self._calls.poll()
        for _ in range(num_done - self._num_done):
            self.kv.pool.release(self._held.popleft())
        self._num_done = num_done

    def receives(self, request: Request) -> bool:
        """Return whether another server has blocks of a request."""
        return request.transfer is not None and bool(request.transfer.blocks) and self._settings.receives

    def expect(self, request: Request) -> None:
        """Tell the workers which blocks of a waiting request another server has."""
        source = request.transfer
        self.kv.match(request)  # hashes the blocks
        hashes = request.block_hashes
        keys = [
            group.tag + hashes[i]
            for group, numbers in zip(self.kv.by_group, source.blocks)
            for i in numbers
            if 0 <= i < len(hashes)
        ]
        missing = [key for key in keys if self.kv.pool.find(key) is None]
        if missing:
            self._calls.expect(source.host, source.port, missing)
