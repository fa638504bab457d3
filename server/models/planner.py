"""Plans the models of a server in a process of its own, in the order in which the plans are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

import msgspec

from quire.server.engines.spawn import python_environment
from quire.server.models.entry import ModelEntry
from quire.server.models.need import Planned

logger = logging.getLogger("quire")

_decode = msgspec.json.Decoder(Planned).decode
_MAX_LINE = 1 << 20
_ENDED = "the process that plans models ended"


class Planner:
    """`plans` holds a future of each model's plan, by name. `run` fills them all, those that are waited for first."""

    def __init__(self, entries: Sequence[ModelEntry]):
        self.entries = {entry.name: entry for entry in entries}
        loop = asyncio.get_running_loop()
        self.plans: dict[str, asyncio.Future[Planned]] = {name: loop.create_future() for name in self.entries}
        self._order = list(self.entries)
        self._process: asyncio.subprocess.Process | None = None

    async def get(self, name: str) -> Planned:
        """Return the plan of a model, ahead of the plans for which no request waits."""
        if name in self._order:
            self._order.remove(name)
            self._order.insert(0, name)
        return await asyncio.shield(self.plans[name])

    def finished(self, name: str) -> Planned | None:
        plan = self.plans[name]
        return plan.result() if plan.done() else None

    async def run(self) -> None:
        """Plan every model."""
        try:
            while self._order:
                await self._plan_all()
        finally:
            for plan in self.plans.values():  # or requests would wait for them
                if not plan.done():
                    plan.set_result(Planned(error=_ENDED))
            await self.close()

    async def _plan_all(self) -> None:
        """Plan until all are planned, or the process ends; then the model being planned has no plan."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "quire.cli.plan_models",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=python_environment(),
            process_group=0,
            limit=_MAX_LINE,
        )
        while self._order:
            name = self._order.pop(0)
            config = msgspec.msgpack.encode(self.entries[name].config)
            line = b""
            with contextlib.suppress(OSError):
                process.stdin.write(len(config).to_bytes(4, "big") + config)
                await process.stdin.drain()
                line = await process.stdout.readline()
            if self._process is not process:  # closed
                return
            found = _read(line)
            if found.error is not None:
                logger.warning("there is no memory plan of the model %s: %s", name, found.error)
            self.plans[name].set_result(found)
            if not line:
                return

    async def close(self) -> None:
        """End the process; models that are not planned have no plan."""
        self._order.clear()
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, 9)
        await process.wait()


def _read(line: bytes) -> Planned:
    if not line:
        return Planned(error=_ENDED)
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        return Planned(error=f"the process that plans models wrote no plan: {error}")
