"""The start of a worker without weights, for `quire check`."""

from __future__ import annotations

from quire.configs.config import Config
from quire.worker.messages import WorkerReady
from quire.worker.models.registry import without_memory
from quire.worker.startup.plan import estimated, plan
from quire.worker.startup.ranks import Ranks
from quire.worker.startup.ready import ready
from quire.worker.startup.resolve import Resolved, resolve
from quire.worker.weights.loader import check_files, check_model


def preview(config: Config, *, files: bool = False, draft_files: bool = False) -> WorkerReady:
    """Estimate what a worker would report, from config.json and the memory that is free now. With `files` and
    `draft_files`, the headers of the weights of the model and of the draft model are compared with it.

    Raises ValueError as the worker would: both run the same stages, but this one compares headers where the worker
    loads weights.
    """
    ranks = Ranks(config)
    resolved = resolve(config, ranks, preview=True)
    check_model(config, resolved.spec, files=files)
    if draft_files and resolved.limits.draft is not None:
        _check_draft(resolved)
    return ready(resolved, plan(resolved, estimated(resolved), ranks))


def _check_draft(resolved: Resolved) -> None:
    """Raise ValueError if the files of the draft model do not fit its config.json."""
    limits = resolved.limits
    draft = without_memory(limits.draft, limits.dtype)
    if limits.speculation.eagle:
        draft.share(without_memory(resolved.spec, limits.dtype).model)
    check_files(draft, limits.draft, limits.speculation.model)
