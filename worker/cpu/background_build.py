"""Wait for a library of native kernels that a separate process compiles while plain torch serves."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

from quire.worker.cpu import build

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.2  # seconds between looks at the files
REPORT_INTERVAL = 15.0  # seconds between lines in the log


class BackgroundBuild:
    """Starts a builder of `level`, and of the levels `then`, unless another process is building it. A running builder
    continues after this process ends, for the next start; builders do not wait for each other.
    """

    def __init__(self, level: str, then: list[str]):
        self.level, self.then = level, then
        self.target = build.cache_folder() / build.library_name(level, build.compiler())
        self._builder: subprocess.Popen | None = None
        self._look_at = 0.0  # time.monotonic()
        self._report_at = time.monotonic() + REPORT_INTERVAL
        self._start()

    def _start(self) -> None:
        if build.is_being_built(self.target):
            return
        options = ["--no-wait", "--level", self.level, *(f"--then={rival}" for rival in self.then)]
        self._builder = subprocess.Popen(
            [sys.executable, build.__file__, *options, "--into", str(self.target.parent)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def status(self) -> str:
        """Return a line for the log and the table of choices."""
        num_done, num_files = build.progress(self.target)
        return f"building native kernels ({self.level}) in the background: {num_done} of {num_files} files"

    def poll(self) -> Path | None:
        """Return the library once it is there. Raises BuildError if the compiler failed."""
        now = time.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_INTERVAL
        if self.target.exists():
            self._end()
            return self.target
        if now >= self._report_at:
            self._report_at = now + REPORT_INTERVAL
            logger.info("%s; plain torch serves meanwhile", self.status)
        if self._builder is None or self._builder.poll() is not None:
            self._check_end()
        return None

    def _check_end(self) -> None:
        """Fail if our builder failed, or take over from another that ended without a library. Called while no builder
        of this server runs.
        """
        if self._builder is not None:
            code, output = self._builder.returncode, self._end()
            if code != build.BUSY and not self.target.exists():
                raise build.BuildError(output)
        if not build.is_being_built(self.target) and not self.target.exists():
            self._start()

    def _end(self) -> str:
        """Release our builder, which has ended except for later builds. Returns its output."""
        builder, self._builder = self._builder, None
        if builder is None:
            return ""
        if builder.poll() is None:  # the library is there: it is about to end
            builder.wait()
        with builder.stdout:
            return builder.stdout.read()
