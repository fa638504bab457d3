"""The requests that depend on a request that failed.

Blocks are shared before the step that fills them is known to succeed. When a step fails a request, every request that
read blocks filled by it, in the same step or in later steps in flight, is recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quire.engine.kv.manager import KVCacheManager
from quire.engine.request import Request
from quire.engine.step import Step


def dependents(
    in_flight: Iterable[Step], step: Step, failed: Collection[int], kv: KVCacheManager
) -> tuple[set[Request], set[int]]:
    """Return (requests that read blocks filled by the failed ones in `step` or later, all invalid blocks). `failed` are
    batch positions of `step`, the first step in flight. The requests' results in the steps in flight are discarded.

    Other requests can find such a block only since `step`, and all later steps are still in flight, so no token that
    depends on it has been delivered. It is enough to walk these steps in order and track which requests were admitted
    on such blocks and which blocks those requests published in turn.
    """
    failing = {step.requests[i] for i in failed}
    tainted, blocks = set(failing), set()
    for later in in_flight:
        entered = {new.row: new.block_ids for new in later.input.new}
        for i, request in enumerate(later.requests):
            if later is not step or i not in failed:
                block_ids = entered.get(later.input.rows[i])
                if block_ids is not None:
                    # the request enters the batch: only its cached prefix counts, not its earlier steps
                    prefix = kv.shared_prefix(block_ids, later.input.num_computed[i])
                    (tainted.discard if blocks.isdisjoint(prefix) else tainted.add)(request)
                if request in tainted and i not in later.ignored:
                    later.ignore(i)
            if request in tainted:
                blocks.update(later.published.get(request, ()))
            else:
                # the same block, filled again with valid data
                blocks.difference_update(later.published.get(request, ()))
        for request in later.published.keys() & tainted:
            blocks.update(later.published[request])  # blocks published after the request left the batch
    return tainted - failing, blocks
