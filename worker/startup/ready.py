"""Last stage of a start: the report to the engine."""

from __future__ import annotations

from quire.worker.estimates import media_info
from quire.worker.messages import PoolingInfo, WorkerReady
from quire.worker.models import describe
from quire.worker.startup.plan import Planned
from quire.worker.startup.resolve import Resolved


def ready(
    resolved: Resolved,
    planned: Planned,
    *,
    pooling: PoolingInfo | None = None,
    works_idle: bool = False,
    gives_back: bool = False,
) -> WorkerReady:
    """Return the sizes and choices of this rank. `pooling` needs the loaded model, as does whether there is work for
    idle times, and whether the cache's memory can be given back.
    """
    spec, limits, platform = resolved.spec, resolved.limits, resolved.platform
    stages = resolved.config.parallel.pipeline_parallel_size
    num_states = planned.num_states
    choices = [describe.choice(spec), *limits.choices, *resolved.started, *planned.choices]
    if resolved.pooling is not None:
        choices.append(("pooling", "+".join(resolved.pooling.methods), resolved.pooling.reason))
    return WorkerReady(
        num_blocks=planned.num_blocks,
        block_size=limits.attention.block_size,
        max_model_len=planned.max_model_len,
        max_num_seqs=min(limits.max_num_seqs, num_states // 2) if num_states else limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        # one step per stage, and one for the scheduler
        default_depth=platform.default_depth if stages == 1 else stages + 1,
        plan=planned.memory,
        choices=choices,
        groups=list(resolved.cache.groups),
        media=media_info(spec, limits, platform),
        num_states=num_states,
        warnings=planned.warnings,
        max_loras=resolved.lora.max_active if resolved.lora is not None else 0,
        tiers=resolved.tiers,
        pooling=pooling,
        works_idle=works_idle,
        gives_back=gives_back,
        overlaps=platform.overlaps,
        compiles_at_use=platform.compiles_at_use,
    )
