"""An engine process that waits for its model, and imports its packages meanwhile."""

from __future__ import annotations

from quire.configs.config import Config, ParallelConfig
from quire.server.engines.process import EngineProcess
from quire.server.engines.spawn import EarlyEngine


class SpareEngine:
    """Keeps at most one process that has imported an executor, with this niceness, and waits for its configuration; at
    first the `early` one.
    """

    def __init__(self, niceness: int = 0, early: EarlyEngine | None = None) -> None:
        self._niceness = niceness
        self._engine = None if early is None else EngineProcess(None, early=early)
        self._executor = "" if early is None else early.executor

    def prepare(self, parallel: ParallelConfig) -> None:
        """Start a process for a model with such settings, unless one exists. Call it in the main thread."""
        if parallel.data_parallel_size > 1:
            return
        if self._engine is not None:
            if parallel.executor == self._executor:
                return
            self.close()
        try:
            self._engine, self._executor = EngineProcess(None), parallel.executor
            self._engine.preload(self._executor, self._niceness)
        except OSError:  # out of processes, memory or disk: the model's own engine reports it
            self.close()

    def take(self, config: Config) -> EngineProcess | None:
        """Return the process with its configuration set, or None if no live process has such settings."""
        parallel = config.parallel
        if self._engine is None or parallel.data_parallel_size > 1 or parallel.executor != self._executor:
            return None
        engine, self._engine = self._engine, None
        if engine.poll() is not None:
            engine.kill()
            return None
        engine.config = config
        return engine

    def close(self) -> None:
        """End the process."""
        if self._engine is not None:
            self._engine.kill()
            self._engine = None
