"""The metrics of several engines on one page: each family once, with one series per engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from quire.configs.config import Config
from quire.engine.messages import WorkerReady
from quire.server.metrics.metrics import Metrics
from quire.server.metrics.view import render
from quire.server.request.sink import ALL, View


def make_metrics(config: Config, model_name: str, worker: WorkerReady) -> Metrics | MetricsPool:
    """Return one `Metrics` per engine, pooled if there are several."""
    every = [
        Metrics(model_name, worker.max_model_len, config.server.vllm_metrics, engine)
        for engine in range(config.parallel.data_parallel_size)
    ]
    for metrics in every:
        metrics.max_loras = worker.max_loras
        metrics.tiers.limits = tier_limits(worker)
        metrics.set_cache_config(
            **{**dataclasses.asdict(config.cache), "block_size": worker.block_size, "num_gpu_blocks": worker.num_blocks}
        )
    return MetricsPool(every) if len(every) > 1 else every[0]


def tier_limits(worker: WorkerReady) -> dict[str, int]:
    """Return the bytes that the tiers below the KV cache may have."""
    return {tier.name: tier.limit for tier in worker.tiers if tier.limit}


class MetricsPool(Collector):
    """`of(engine)` records the requests of one engine; the first engine records metrics that belong to no engine."""

    def __init__(self, engines: list[Metrics]):
        self.engines = engines
        self.observe_http = engines[0].observe_http
        self.observe_evicted = engines[0].observe_evicted
        self.observe_key, self.observe_key_refusal = engines[0].observe_key, engines[0].observe_key_refusal
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def for_engine(self, engine: int) -> Metrics:
        return self.engines[engine]

    def render(self, view: View = ALL) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return render(self.registry, view)

    def collect(self) -> Iterator[Any]:
        return merged(family for engine in self.engines for family in engine.collect())


def merged(families: Iterable[Any]) -> Iterator[Any]:
    """Yield each family of metrics once, with the samples of all families of its name."""
    found: dict[str, Any] = {}
    for family in families:
        if family.name in found:
            found[family.name].samples += family.samples
        else:
            found[family.name] = family
    yield from found.values()
