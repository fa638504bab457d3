"""Read another server's memory with NIXL, where its package is installed: by RDMA or another transport of UCX."""

from __future__ import annotations

import importlib
import logging
import mmap
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
MEMORY = "DRAM"


def open_nixl(backends: Sequence[str]) -> Nixl | None:
    """Return an agent with NIXL's `backends`; None, with a warning, if they are not available."""
    if not backends:
        return None
    for name in PACKAGES:
        try:
            api = importlib.import_module(f"{name}._api")
            return Nixl(api, backends)
        except ImportError:
            continue
        except Exception as error:  # its own kinds, one per status
            logger.warning("--kv-transfer-config: NIXL does not start (%s): blocks are sent over TCP", error)
            return None
    logger.warning("--kv-transfer-config: backends need the package nixl: blocks are sent over TCP")
    return None


class Nixl:
    """An agent of NIXL. `version` counts changes of the offered memory, which `description` tells other agents."""

    def __init__(self, api: Any, backends: Sequence[str]):
        self._agent = api.nixl_agent(f"quire-{uuid.uuid4().hex}", api.nixl_agent_config(backends=list(backends)))
        self._lock = threading.Lock()
        self.version = 1

    def offer(self, memory: mmap.mmap) -> tuple[int, Any]:
        """Let other agents read this memory. Returns its address, and the handle for `withdraw`."""
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        with self._lock:
            handle = self._agent.register_memory([(address, len(memory), 0, "")], MEMORY)
            self.version += 1
        return address, handle

    def withdraw(self, handle: Any) -> None:
        with self._lock:
            self._agent.deregister_memory(handle)
            self.version += 1

    def description(self) -> tuple[int, bytes]:
        """Return (version, bytes for `learn` of another agent)."""
        with self._lock:
            return self.version, self._agent.get_agent_metadata()

    def learn(self, description: bytes) -> str:
        """Take another agent's description. Returns its name."""
        name = self._agent.add_remote_agent(description)
        return name.decode() if isinstance(name, bytes) else name

    def read(self, name: str, address: int, size: int, timeout: float) -> bytes:
        """Return the content of another agent's memory. Raises NIXL's errors, TimeoutError."""
        content = np.empty(size, np.uint8)
        here = [(content.ctypes.data, size, 0, "")]
        handle = self._agent.register_memory(here, MEMORY)
        try:
            local = self._agent.get_xfer_descs([one[:3] for one in here], MEMORY)
            there = self._agent.get_xfer_descs([(address, size, 0)], MEMORY)
            transfer = self._agent.initialize_xfer("READ", local, there, name)
            try:
                self._wait(transfer, timeout)
            finally:
                self._agent.release_xfer_handle(transfer)
        finally:
            self._agent.deregister_memory(handle)
        return content.tobytes()

    def _wait(self, transfer: Any, timeout: float) -> None:
        end, state = time.monotonic() + timeout, self._agent.transfer(transfer)
        while state == "PROC":
            if time.monotonic() > end:
                raise TimeoutError("NIXL does not finish a read")
            time.sleep(0.0001)
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise TimeoutError(f"NIXL: {state}")
