"""Downloads of models that clients ask for, each in a process of its own: it slows no request, and can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

from quire.server.engines.spawn import python_environment
from quire.server.errors import BadRequest, EngineError, Unavailable

MAX_PULLS = 4  # at once
_MODULE = "quire.checkpoints.pulling"


class Pulls:
    """Running downloads. Belongs to one event loop."""

    def __init__(self) -> None:
        self.num_running = 0

    def require_room(self) -> None:
        """Raise Unavailable if MAX_PULLS downloads run."""
        if self.num_running >= MAX_PULLS:
            raise Unavailable(f"{MAX_PULLS} downloads run already; this server runs no more at once.", retry_after=30)

    async def pull(
        self, model: str, download_dir: str | None, adapter: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the lines of a download, as /api/pull has them, without `success`. `aclose` ends the download, which
        a later one continues. Raises BadRequest if the model cannot be had, Unavailable if too many run.
        """
        self.require_room()
        self.num_running += 1
        # -P: modules in the current folder must not shadow ours
        command = ["-P", "-m", _MODULE, *(["--adapter"] if adapter else [])]
        command += ["--download-dir", download_dir] if download_dir else []
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                "--",
                model,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env=python_environment(),
                start_new_session=True,  # Ctrl-C ends the server, which ends the download
            )
            async for line in process.stdout:
                found = json.loads(line)
                if (error := found.get("error")) is not None:
                    raise BadRequest(f"{error[:1].upper()}{error[1:]}.", param="model")
                yield found
            if (status := await process.wait()) != 0:
                raise EngineError(f"The download ended with status {status}; the server's log may say why.")
        finally:
            self.num_running -= 1
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
