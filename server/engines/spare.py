"""An engine process that waits for its model, and imports its packages meanwhile."""

from __future__ import annotations

from quire.configs.config import Config, ParallelConfig
from quire.server.engines.process import EngineProcess


class SpareEngine:
    """Keeps at most one process that has imported an executor, with this niceness, and waits for its configuration."""

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._engine: EngineProcess | None = None
        self._executor = ""

    def prepare(self, parallel: ParallelConfig) -> None:
        """Start a process for a model with such settings, unless one exists. Call it in the main thread."""
        if self._engine is not None or parallel.data_parallel_size > 1:
            return
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
