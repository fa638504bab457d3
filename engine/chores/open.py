"""The chores of the features that are on."""

from __future__ import annotations

from collections.abc import Callable

from quire.configs.config import Config
from quire.engine.chores.base import Chore
from quire.engine.chores.encoded import NoteEncoded
from quire.engine.chores.give_back import GiveBack
from quire.engine.chores.idle_work import IdleWork
from quire.engine.chores.kernels import LookForKernels
from quire.engine.chores.kv_events import publish_kv_events
from quire.engine.chores.save_hot import SaveHot
from quire.engine.chores.slow_steps import WarnOfSlowSteps
from quire.engine.chores.transfers import CopyBlocks
from quire.engine.scheduler import Scheduler
from quire.worker.messages import WorkerCalls, WorkerReady


def open_chores(
    config: Config,
    ready: WorkerReady,
    scheduler: Scheduler,
    workers: WorkerCalls,
    index: int,
    schedule_stats: Callable[[], None],
) -> list[Chore]:
    """Return the chores of engine `index`. Raises ValueError for settings that cannot be followed."""
    tiers, chores = scheduler.tiers, []
    if events := publish_kv_events(config.cache, scheduler.kv, tiers, index):
        chores.append(events)
    if scheduler.transfers is not None:
        chores.append(CopyBlocks(scheduler.transfers))
    if tiers is not None and tiers.save_hot:
        chores.append(SaveHot(scheduler.contents, tiers, ready.plan.bytes_per_block, schedule_stats))
    if ready.gives_back:
        chores.append(GiveBack(scheduler.kv, workers, ready))
    if workers.look_for_ops():
        chores.append(LookForKernels(workers))
    if ready.works_idle:
        chores.append(IdleWork(workers))
    if config.server.slow_step_threshold:
        chores.append(WarnOfSlowSteps(config.server.slow_step_threshold, scheduler))
    if config.server.otlp_traces_endpoint:
        chores.append(NoteEncoded(workers))
    return chores
