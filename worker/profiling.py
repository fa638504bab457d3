"""Profiles of a worker by torch's profiler, as traces for chrome://tracing, Perfetto and TensorBoard."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MAX_STEPS = 2000  # most steps of a profile: a forgotten one would fill the memory
_MAX_EVENTS_SECONDS = 120.0  # the same for long steps


class StepProfiler:
    """Records the operations of a worker's steps between `start` and `stop`, which are called in the steps' thread."""

    def __init__(self, folder: str | None, rank: int):
        self.folder, self.rank = folder, rank
        self._profile: profile | None = None
        self._is_taking = False
        self._num_steps, self._started = 0, 0.0

    def start(self) -> str:
        """Begin a profile. Returns why none can begin, "" if it has begun."""
        if self.folder is None:
            return "this server takes no profiles: start it with --torch-profiler-dir"
        if self._profile is not None:
            return "a profile has begun already"
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--torch-profiler-dir: {error.strerror}"
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=kinds, record_shapes=True)
        self._profile.start()
        self._is_taking, self._num_steps, self._started = True, 0, time.monotonic()
        return ""

    def step(self) -> None:
        """Mark the beginning of a step."""
        if not self._is_taking:
            return
        self._num_steps += 1
        if self._num_steps > MAX_STEPS or time.monotonic() - self._started > _MAX_EVENTS_SECONDS:
            self._profile.stop()
            self._is_taking = False

    def stop(self) -> tuple[str, str]:
        """Write the trace. Returns (why there is none, or ""; the name of its file)."""
        if self._profile is None:
            return "no profile has begun", ""
        taken, self._profile = self._profile, None
        if self._is_taking:
            taken.stop()
            self._is_taking = False
        name = f"rank{self.rank}-{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
        try:
            taken.export_chrome_trace(str(Path(self.folder, name)))
        except (OSError, RuntimeError) as error:
            return f"the profile cannot be written: {error}", ""
        return "", name
