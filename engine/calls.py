"""Calls of servers: the methods that `EngineCalls` declares, run between two steps."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.configs.log_ring import kept_lines
from quire.engine.chores.base import Chore
from quire.engine.chores.kv_events import PublishKVEvents
from quire.engine.kv.slots import Later, Slots
from quire.engine.scheduler import Outputs, Scheduler
from quire.worker.messages import WorkerCalls


class Calls:
    """Implements `EngineCalls`. `send` sends outputs to servers. A `Later` runs in parts, between several steps."""

    def __init__(self, scheduler: Scheduler, workers: WorkerCalls, send: Callable[[Outputs], None]):
        self._scheduler, self._workers, self._send = scheduler, workers, send
        self.chores: list[Chore] = []

    def reset_prefix_cache(self) -> bool:
        if done := self._scheduler.contents.reset_prefix_cache():
            self._workers.forget_texts()
        return done

    def free_cache(self, key: str) -> bool:
        self._workers.forget_conversation(key)
        return self._scheduler.contents.free_key(key)

    def set_vocabulary(self, vocabulary: bytes) -> None:
        self._workers.set_vocabulary(vocabulary)

    def load_lora(self, key: str, folder: str) -> str:
        return self._workers.load_lora(key, folder)

    def unload_lora(self, key: str) -> None:
        self._workers.unload_lora(key)

    def start_profile(self) -> str:
        return self._workers.start_profile()

    def stop_profile(self) -> list[str]:
        return list(self._workers.stop_profile())

    def save_slot(self, number: int, name: str) -> Later | None:
        return self._slots.save(number, name)

    def restore_slot(self, number: int, name: str) -> Later | None:
        return self._slots.restore(number, name)

    def erase_slot(self, number: int) -> Later | None:
        return self._slots.erase(number)

    @property
    def _slots(self) -> Slots:
        if (slots := self._scheduler.contents.slots) is None:
            raise ValueError("slot files need prefix caching")
        return slots

    def waiting(self, request_ids: list[str]) -> list[str]:
        return self._scheduler.not_started(request_ids)

    def log_lines(self) -> list[dict[str, object]]:
        return [dict(line) for line in kept_lines()]

    def requests(self) -> list[dict[str, object]]:
        return self._scheduler.describe()

    def abort(self, request_ids: list[str]) -> list[str]:
        outputs = self._scheduler.end(request_ids)
        self._send(outputs)
        return [output.request_id for client_outputs in outputs.values() for output in client_outputs]

    def stats(self) -> dict[str, object]:
        return msgspec.structs.asdict(self._scheduler.stats())

    def describe_tiers(self) -> dict[str, object] | None:
        return self._scheduler.tiers and self._scheduler.tiers.describe()

    def kv_event_source(self) -> dict[str, object] | None:
        return next((chore.source for chore in self.chores if isinstance(chore, PublishKVEvents)), None)

    def describe_ops(self) -> dict[str, object]:
        return self._workers.describe_ops()
