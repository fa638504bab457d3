"""Loads and unloads models: a request loads its model, and the least recently used ones make room within one budget of
memory.

A model that a request uses is never ended for another. If room is missing, the idle models go first; when that is not
enough, the least recently used ones take no new requests until the waiting model is loaded, so that none waits forever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path

from quire.checkpoints import hub
from quire.checkpoints.sizes import format_each
from quire.configs.config import Config
from quire.configs.several import LOAD_NICENESS
from quire.server.engines.spare import SpareEngine
from quire.server.engines.supervisor import in_thread
from quire.server.errors import ApiError, BadRequest, Unavailable
from quire.server.http.read_body import BYTES_PER_TOKEN, MIN_BYTES_WITH_IMAGES
from quire.server.models.entry import ModelEntry
from quire.server.models.host import HostState
from quire.server.models.loaded import FAILED, LOADED, LOADING, UNLOADED, UNLOADING, LoadFailed, Model
from quire.server.models.need import Need, Planned, guessed_need, loaded_need, need_of
from quire.server.models.planner import Planner

logger = logging.getLogger("quire")

FREE_SHARE = 0.8  # of the memory free at start, without --models-memory-bytes
MAX_LOADING = 2  # models that load at the same time
BACK_OFF, MAX_BACK_OFF = 2.0, 300.0  # seconds until a failed model is tried again, doubled each time


class Models:
    """The models of a server. Make it on the event loop; `run` ends only by cancellation."""

    def __init__(self, config: Config, entries: Sequence[ModelEntry], host: HostState):
        self.config, self.host = config, host
        asked = config.models.load_niceness
        self._niceness = LOAD_NICENESS if asked is None else asked
        self.spare = SpareEngine(self._niceness)
        self.models = {
            entry.name: Model(entry, host.share, self._on_change, host.observe_stats, self.spare.take)
            for entry in entries
        }
        host.models = self.models
        self.planner = Planner(entries)
        self.changed: set[asyncio.Event] = set()  # set at each change of a status
        self._budget = config.models.models_memory_bytes
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # in a row, and when it is tried again (time.monotonic())
        self._queue: deque[Model] = deque()  # models that wait for room, in order
        self._room = asyncio.Event()  # replaced by each `_notify`
        self._giving_way: set[str] = set()  # take no new requests, because the first in the queue needs room
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    async def run(self) -> None:
        """Plan all models, load the pinned ones, and watch the loaded ones."""
        planning = asyncio.create_task(self.planner.run())
        try:
            for model in self.models.values():
                if model.entry.pinned:
                    self._start(model)
            await asyncio.Future()
        finally:
            self.spare.close()
            planning.cancel()
            await asyncio.gather(planning, return_exceptions=True)

    async def end(self) -> None:
        """Unload every model."""
        for task in (*self._loads.values(), *self._tasks):
            task.cancel()
        await asyncio.gather(*self._loads.values(), *self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.unload() for model in self.models.values() if model.has_engines))
        await self.planner.close()
        self.spare.close()

    def kill(self) -> None:
        self.spare.close()
        for model in self.models.values():
            model.kill()

    def refuse(self) -> None:
        """Refuse new requests from now on."""
        for model in self.models.values():
            model.state.draining = True
        self._notify_watchers()

    def _on_change(self, model: Model) -> None:
        if model.status in (UNLOADED, FAILED):
            self._notify()
        self._notify_watchers()

    def prepare_spare(self) -> None:
        """Start the engine process of the next model, if there is one to load and none is loading."""
        if self._num_loading() or self.host.draining:
            return
        for model in self.models.values():
            if model.status in (UNLOADED, FAILED):
                self.spare.prepare(model.entry.config.parallel)
                return

    def _notify_watchers(self) -> None:
        for event in self.changed:
            event.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- use

    async def enter(self, model: Model, keep_alive: float | None = None) -> None:
        """Load a model unless it is loaded, and keep it until `leave`. `keep_alive` replaces the seconds for which
        it stays afterwards. Raises Unavailable, and BadRequest for a model that cannot fit.
        """
        await self._enter(model)
        if keep_alive is not None:
            model.keep_alive = keep_alive
        model.stay()

    def leave(self, model: Model) -> None:
        """End what `enter` began."""
        model.num_leases -= 1
        model.last_used = time.monotonic()
        if not model.num_leases:
            self._on_idle(model)

    async def _enter(self, model: Model) -> None:
        """Take a lease of the model, which is then loaded."""
        self._check_queue(model)
        while True:
            if model.status == LOADED and model.name not in self._giving_way:
                model.num_leases += 1
                return
            self._check(model)
            if model.name not in self._giving_way:
                self._start(model)
            waiter = asyncio.get_running_loop().create_future()
            model.waiters.append(waiter)
            try:
                await waiter  # raises as the loading
                return
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self.leave(model)  # the lease came when the client had left
                raise
            except LoadFailed:
                continue
            finally:
                if waiter in model.waiters:
                    model.waiters.remove(waiter)

    def _check_queue(self, model: Model) -> None:
        """Raise Unavailable if too many requests wait for the model to load."""
        limit = model.entry.config.server.max_num_queued_reqs
        if limit and len(model.waiters) >= limit:
            raise Unavailable(
                f"{limit} requests wait for the model '{model.name}' to load, which is the limit "
                "(--max-num-queued-reqs).",
                retry_after=5,
            )

    def _check(self, model: Model) -> None:
        """Raise Unavailable during the back-off of a failed model and while the server drains."""
        failed = self._failures.get(model.name)
        if failed is not None and time.monotonic() < failed[1]:
            raise Unavailable(
                f"The model '{model.name}' cannot be loaded: {model.error}",
                code="model_failed",
                retry_after=max(round(failed[1] - time.monotonic()), 1),
            )
        if self.host.draining:
            raise _shutting_down()

    def _on_idle(self, model: Model) -> None:
        """Handle a model that no request uses: notify those that wait for room, and unload it after its time."""
        if model.is_busy:  # background responses
            self._spawn(self._idle_later(model))
            return
        self._notify()
        if not model.entry.pinned and model.keep_alive >= 0 and model.status == LOADED:
            model.leave_in(model.keep_alive, lambda: self._spawn(self._expire(model)))

    async def _idle_later(self, model: Model) -> None:
        await model.state.idle.wait()
        if not model.is_busy:
            self._on_idle(model)

    async def _expire(self, model: Model) -> None:
        if not model.is_busy and model.status == LOADED:
            await self.unload(model)

    def _notify(self) -> None:
        """Wake those that wait for room."""
        self._room.set()
        self._room = asyncio.Event()

    # ---- loading

    def _start(self, model: Model) -> None:
        """Begin to load a model, unless that was begun."""
        if model.name not in self._loads:
            task = self._loads[model.name] = asyncio.create_task(self._load(model))
            task.add_done_callback(lambda done: self._on_loaded(model, done))

    def _on_loaded(self, model: Model, task: asyncio.Task[None]) -> None:
        """Give everyone who waited a lease, or the error. Requests that came after the loading was cancelled, or after
        the model was unloaded at once, start it again.
        """
        del self._loads[model.name]
        is_gone = task.cancelled() or (task.exception() is None and model.status != LOADED)
        if is_gone and not self.host.draining:
            if model.waiters:
                self._start(model)
            self._notify()
            self.prepare_spare()
            return
        error = _shutting_down() if is_gone else task.exception()
        if error is not None or model.name not in self._giving_way:  # else those who wait come after it was unloaded
            self._wake(model, error)
        self._notify()
        if error is not None and not isinstance(error, LoadFailed | ApiError):
            logger.error("the model %s cannot be loaded", model.name, exc_info=error)
        if not model.num_leases and model.status == LOADED:
            self._on_idle(model)
        self.prepare_spare()

    def _wake(self, model: Model, error: BaseException | None) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                model.num_leases += 1
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    async def _load(self, model: Model) -> None:
        """Load a model once there is room. Raises LoadFailed, and BadRequest for a model that cannot fit."""
        while model.status == UNLOADING:
            await self._changed()
        need = await self._need(model)
        self._queue.append(model)
        try:
            await self._wait_for_room(model, need)
            model.need = need
        finally:
            self._queue.remove(model)
            self._give_way(set())
            self._notify()
        try:
            serves = any(one.status == LOADED for one in self.models.values())
            await model.load(need, self._niceness if serves else None)
            self._wake(model, None)  # at once, or it would be idle, and make room for another
        except LoadFailed:
            count = self._failures.get(model.name, (0, 0.0))[0] + 1
            wait = min(BACK_OFF * 2 ** (count - 1), MAX_BACK_OFF)
            self._failures[model.name] = (count, time.monotonic() + wait)
            raise
        finally:
            if model.state.ready is not None:
                planned = self.planner.finished(model.name)
                model.need = loaded_need(model.state.ready.worker.plan, planned.process if planned is not None else 0)
            self._notify()
        self._failures.pop(model.name, None)

    def _give_way(self, names: set[str]) -> None:
        """Stop new requests for models `names`; others resume, at once if they are loaded."""
        before, self._giving_way = self._giving_way, names
        for model in map(self.models.__getitem__, before - names):
            if model.status == LOADED:
                self._wake(model, None)
            elif model.waiters:
                self._start(model)

    async def _changed(self) -> None:
        """Wait for a change of a status."""
        event = asyncio.Event()
        self.changed.add(event)
        try:
            await event.wait()
        finally:
            self.changed.discard(event)

    async def _need(self, model: Model) -> Need:
        """Return a model's need. Raises BadRequest if it exceeds the budget even alone."""
        planned = await self.planner.get(model.name)
        budget = self.budget(planned)
        if planned.error is None:
            need = need_of(planned, budget, model.entry.config.cache.kv_cache_memory_bytes)
        else:
            need = guessed_need(await in_thread(lambda: _file_bytes(model.entry.source)), budget)
        if need.total > budget:
            raise BadRequest(
                f"The model '{model.name}' needs {need}, more than the {format_each(budget)[0]} that all models may "
                "take (--models-memory-bytes).",
                param="model",
                code="model_too_large",
            )
        return need

    def budget(self, planned: Planned) -> int:
        """Return the bytes that loaded models may take together."""
        if self._budget is None and planned.error is None:
            share = self.config.cache.gpu_memory_utilization
            self._budget = int(FREE_SHARE * planned.available if planned.shares_ram else share * planned.total)
            logger.info("loaded models may take %s together (--models-memory-bytes)", format_each(self._budget)[0])
        return self._budget or 1 << 62

    async def _wait_for_room(self, model: Model, need: Need) -> None:
        """Return once the model is the first in the queue and there is room for it."""
        while self._queue[0] is not model or self._num_loading() >= MAX_LOADING:
            await self._room.wait()
        while not self._fits(need):
            room = self._room
            victims = self._victims(need)
            self._give_way({one.name for one in victims})
            if idle := [one for one in victims if not one.is_busy]:
                unloading = [self._spawn(self.unload(one)) for one in idle]
                await asyncio.shield(asyncio.gather(*unloading))  # a cancelled load does not stop half of it
            else:
                await room.wait()

    def _num_loading(self) -> int:
        return sum(model.status == LOADING for model in self.models.values())

    def _present(self) -> list[Model]:
        """Return the models that occupy memory."""
        return [model for model in self.models.values() if model.need is not None]

    def _fits(self, need: Need) -> bool:
        present, most = self._present(), self.config.models.models_max
        if most and len(present) >= most:
            return False
        return sum(model.need.total for model in present) + need.total <= (self._budget or 1 << 62)

    def _victims(self, need: Need) -> list[Model]:
        """Return the models that make room: as few as suffice, idle ones first, then in LRU order."""
        candidates = [one for one in self._present() if one.status == LOADED and not one.entry.pinned]
        candidates.sort(key=lambda one: (one.is_busy, one.last_used))
        present = self._present()
        used, count, most = sum(one.need.total for one in present), len(present), self.config.models.models_max
        victims: list[Model] = []
        for one in candidates:
            if used + need.total <= (self._budget or 1 << 62) and not (most and count >= most):
                break
            victims.append(one)
            used, count = used - one.need.total, count - 1
        return victims

    async def unload(self, model: Model) -> None:
        """Unload a loaded model; requests that it still runs fail."""
        if model.status == LOADED:
            await model.unload()
        while model.status == UNLOADING:
            await self._changed()
        self.prepare_spare()
        self._notify()

    # ---- by administrators

    async def load(self, model: Model) -> None:
        """Load a model without a request. Raises Unavailable, BadRequest."""
        await self.enter(model)
        self.leave(model)

    def begin(self, model: Model) -> None:
        """Begin to load a model without a request. Raises Unavailable while it is not tried again."""
        if model.status != LOADED:
            self._check(model)
            self._start(model)

    def begin_unload(self, model: Model) -> None:
        """Begin to wait until no request uses a model, and then unload it."""
        self._spawn(self.unload_idle(model))

    def planned_bytes(self, model: Model) -> int | None:
        """Return what a model will take; None if there is no plan."""
        planned = self.planner.finished(model.name)
        if planned is None or planned.error is not None:
            return None
        return need_of(planned, self.budget(planned), model.entry.config.cache.kv_cache_memory_bytes).total

    def is_present(self, model: Model) -> bool:
        """Return whether a model is loaded, or will be: it loads or waits for room."""
        return model.status == LOADED or model.name in self._loads

    async def unload_idle(self, model: Model) -> None:
        """Unload a model once its requests have ended, those that wait for it to load included. Cancel the loading if
        no request waits.
        """
        while self.is_present(model):
            if model.status == LOADED and not model.is_busy:
                await self.unload(model)
                return
            if model.status != LOADED and not model.waiters:
                loading = self._loads[model.name]
                loading.cancel()
                await asyncio.wait({loading})
                return
            await self._room.wait()

    def most_body_bytes(self) -> int:
        """Return the largest body, in bytes, that any model accepts."""
        plans = filter(None, map(self.planner.finished, self.models))
        tokens = max((plan.max_model_len for plan in plans), default=0)
        return self.config.server.max_body_size or max(MIN_BYTES_WITH_IMAGES, BYTES_PER_TOKEN * tokens)


def _shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)


def _file_bytes(source: str) -> int:
    """Return the size of a model's weights on this machine; 0 if it is not here."""
    try:
        folder = hub.ready_folder(source)
    except ValueError:  # there is no such folder, for example: the loading fails with this reason
        return 0
    if folder is None:
        return Path(source).stat().st_size if Path(source).is_file() else 0
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
