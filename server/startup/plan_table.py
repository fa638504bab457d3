"""Formats the table of memory use and automatically chosen settings, shown before serving and by `quire check`."""

from __future__ import annotations

from quire.checkpoints.sizes import format_bytes, format_each
from quire.engine.messages import WorkerReady, most_blocks


def plan_table(ready: WorkerReady) -> str:
    """Return the table as several lines of text, without a trailing newline."""
    plan = ready.plan
    chunk, longest = ready.max_num_batched_tokens, ready.max_model_len
    of_one = -(-longest // ready.block_size)  # blocks of a request that has one of each token
    num_requests = (ready.num_blocks - 1) / (most_blocks(ready.groups, longest, ready.block_size, chunk) or of_one)
    num_tokens = int(num_requests * of_one * ready.block_size)
    rows = [
        ("weights", plan.weights, ""),
        (
            "activations",
            plan.activations,
            f"one step of {ready.max_num_batched_tokens:,} tokens, {ready.max_num_seqs} requests",
        ),
        (
            "KV cache",
            plan.kv_cache,
            f"{ready.num_blocks - 1:,} blocks of {ready.block_size} tokens, {format_bytes(plan.bytes_per_block)} each",
        ),
        ("reserve", plan.reserve, "left to others"),
    ]
    if plan.images:
        size, budget = ready.media.cache_size, ready.media.encoder_budget
        one = "a piece of as many" if ready.media.audio else "an image of as many"
        largest = "a batch" if ready.media.cross else one
        note = f"{size:,} embeddings kept, and {largest} while it is encoded; {budget:,} in a step"
        rows.insert(2, ("audio" if ready.media.audio else "images", plan.images, note))
    if plan.offload:
        rows.insert(-1, ("RAM tier", plan.offload, "blocks that were used again and leave the KV cache"))
    if plan.adapters:
        rows.insert(2, ("LoRA", plan.adapters, "as many adapters of the largest rank as may be loaded"))
    if plan.graphs:
        rows.insert(2, ("CUDA graphs", plan.graphs, "at most, as batch sizes come up"))
    total, free = format_each(plan.total, plan.available)
    lines = [f"memory of {plan.device}: {total}, of which {free} were free at start"]
    lines += [
        f"  {name:<12} {format_bytes(size):>10}  {_percent(size, plan.available):>4}  {note}".rstrip()
        for name, size, note in rows
    ]
    lines.append(
        f"  fits {num_tokens:,} tokens: {num_tokens / longest:.1f} requests of the full length of {longest:,}"
        if ready.media is None or not ready.media.cross
        else f"  fits {num_requests:.1f} requests: {ready.media.cross:,} positions of audio and {longest:,} tokens each"
    )
    lines += [f"  {line}" for line in _below(ready)]
    if ready.choices:
        width = max(len(setting) for setting, _, _ in ready.choices)
        lines.append("chosen automatically:")
        lines += [f"  {setting:<{width}} = {value}  ({reason})" for setting, value, reason in ready.choices]
    return "\n".join(lines)


def _below(ready: WorkerReady) -> list[str]:
    """Return the lines about the capacity of lower cache tiers."""
    return [
        f"{tier.where}, at most: {format_bytes(tier.limit)} of blocks that were used again and leave the KV cache"
        for tier in ready.tiers
        if tier.limit
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else ""
