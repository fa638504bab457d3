"""The metrics of the tiers below the KV cache: vLLM's `kv_offload_*`, of both of its generations, and ours per tier."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from quire.engine.messages import TierStats

SIZES = tuple(float(1 << shift) for shift in range(12, 35, 2))  # bytes of a transfer: 4 KiB to 16 GiB
_DIRECTIONS = {"store": "GPU_to_CPU", "load": "CPU_to_GPU"}  # vLLM's names, whatever the device is
_COUNTERS = {
    "store_bytes": "Bytes copied from the KV cache to lower tiers.",
    "store_time": "Seconds of copying from the KV cache.",
    "load_bytes": "Bytes copied from lower tiers to the KV cache.",
    "load_time": "Seconds of reading and of copying to the KV cache.",
    "stores_skipped": "Blocks that no tier had room or time for.",
}
_PER_TIER = {
    "read_bytes": "Bytes read, by tier.",
    "read_blocks": "Blocks read, by tier.",
    "read_seconds": "Seconds of reading, by tier.",
    "written_bytes": "Bytes written, by tier.",
    "written_seconds": "Seconds of writing, by tier.",
    "evicted": "Blocks in RAM and files on disk that made room for others.",
    "damaged": "Files or blocks on disk that were torn, changed or foreign.",
}


class TierMetrics:
    """`limits` has the bytes of each tier that takes blocks; without any, nothing is published. Its owner, a
    `Metrics`, is passed to `collect`.
    """

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        self.counts: dict[str, float] = {}
        self._used: dict[str, int] = {}

    def observe(self, stats: TierStats, histograms: dict[str, Any]) -> None:
        self._used = stats.used
        self.add(stats.counts)
        for name, sizes in (("store", stats.store_sizes), ("load", stats.load_sizes)):
            for size in sizes:
                histograms[f"kv_offload_{name}_size"].observe(size)

    def add(self, counts: dict[str, float]) -> None:
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def copy_gauges(self, other: TierMetrics) -> None:
        self.limits, self._used = other.limits, other._used

    def collect(self, prefix: str, metrics: ModuleType) -> Iterator[Any]:
        if not self.limits:
            return
        for name, text in _COUNTERS.items():
            samples = [({}, self.counts.get(name, 0))]
            yield metrics.family(CounterMetricFamily, f"{prefix}kv_offload_{name}", text, samples)
        for unit in ("bytes", "time"):
            samples = [
                ({"transfer_type": to}, self.counts.get(f"{name}_{unit}", 0)) for name, to in _DIRECTIONS.items()
            ]
            text = f"{'Bytes' if unit == 'bytes' else 'Seconds'} of transfers, by direction."
            yield metrics.family(CounterMetricFamily, f"{prefix}kv_offload_total_{unit}", text, samples)
        yield self._sizes(prefix, metrics)
        usage = self._used.get("ram", 0) / self.limits["ram"] if self.limits.get("ram") else 0.0
        text = "Part of the RAM for blocks in use, 0 to 1."
        yield metrics.family(GaugeMetricFamily, f"{prefix}kv_offload_cpu_cache_usage_perc", text, [({}, usage)])
        yield from self._per_tier(prefix, metrics)

    def _sizes(self, prefix: str, metrics: ModuleType) -> HistogramMetricFamily:
        labels = [*metrics.labels, "transfer_type"]
        family = HistogramMetricFamily(f"{prefix}kv_offload_size", "Bytes per transfer, by direction.", labels=labels)
        for name, to in _DIRECTIONS.items():
            histogram = metrics.histogram(f"kv_offload_{name}_size")
            family.add_metric([*metrics.labels.values(), to], histogram.buckets(), histogram.total)
        return family

    def _per_tier(self, prefix: str, metrics: ModuleType) -> Iterator[Any]:
        for name, found, text in (
            ("used_bytes", self._used, "Bytes of blocks, by tier."),
            ("limit_bytes", self.limits, "The most bytes, by tier."),
        ):
            samples = [({"tier": tier}, found.get(tier, 0)) for tier in self.limits]
            yield metrics.family(GaugeMetricFamily, f"{prefix}kv_tier_{name}", text, samples)
        for name, text in _PER_TIER.items():
            samples = [({"tier": tier}, self.counts.get(f"{tier}_{name}", 0)) for tier in self.limits]
            yield metrics.family(CounterMetricFamily, f"{prefix}kv_tier_{name}", text, samples)
