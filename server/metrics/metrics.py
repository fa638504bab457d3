"""The Prometheus metrics: vLLM's, under `quire:` and, for existing dashboards, under `vllm:` as well.

Every value is recorded once, as a plain number; names, labels and families are created on scrape.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.engine.messages import EngineStats, RequestTiming
from quire.server.metrics.tiers import SIZES, TierMetrics
from quire.server.metrics.view import render
from quire.server.request.sink import ALL, View

if TYPE_CHECKING:
    from quire.server.request.generation_request import GenerationRequest

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def _token_buckets(max_model_len: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50 ... up to the context length."""
    bounds = []
    scale = 1
    while scale <= max_model_len:
        bounds += [digit * scale for digit in (1, 2, 5) if digit * scale <= max_model_len]
        scale *= 10
    return bounds


class Histogram:
    """Counts per bucket; a value belongs to the first bucket whose bound is at least the value."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]):
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def add(self, counts: list[int], total: float) -> None:
        """Add the observations of another histogram with the same bounds."""
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, int]]:
        """Return pairs (upper bound, number of observations up to it), in Prometheus' form."""
        cumulative, rows = 0, []
        for bound, count in zip([*self.bounds, float("inf")], self.counts):
            cumulative += count
            rows.append((floatToGoString(bound), cumulative))
        return rows


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a `Metrics`, to be added to those of another."""

    counters: dict[str, float]
    finished: dict[str, int]
    http: list[tuple[tuple[str, str, str], int]]
    histograms: dict[str, tuple[list[int], float]]  # counts per bucket, total
    keys: list[tuple[tuple[str, str, str], int]] = []  # by (metric, name of an API key, code of a refusal)
    accepted_per_position: list[int] = []
    tiers: dict[str, float] = {}


class Metrics(Collector):
    """The metrics of one engine. Written by the event loop alone; `render` may be called from anywhere.

    The `registry` is private, so that no other metrics of this process are published by accident.
    """

    def __init__(self, model_name: str, max_model_len: int, vllm_names: bool = True, engine: int = 0):
        self._made_of = (model_name, max_model_len, vllm_names, engine)
        self.labels = {"model_name": model_name, "engine": str(engine)}
        self._prefixes = ("quire:", "vllm:") if vllm_names else ("quire:",)
        self._stats = EngineStats()
        self._cache_config: dict[str, str] = {}
        self.max_loras = 0  # 0: there are no adapters
        self.tiers = TierMetrics()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._finished = dict.fromkeys(_FINISH_REASONS, 0)
        self._accepted_per_position: list[int] = []  # drafts, by their place after the last known token
        token_buckets = _token_buckets(max_model_len)
        self._http: dict[tuple[str, str, str], int] = {}
        self._keys: dict[tuple[str, str, str], int] = {}
        self._histograms = {
            name: Histogram(token_buckets if bounds is None else bounds) for name, (bounds, _) in _HISTOGRAMS.items()
        }
        self._inter_token = self._histograms["inter_token_latency_seconds"]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def for_engine(self, engine: int) -> Metrics:
        """Return the metrics of `engine`: these, because there is only one engine."""
        return self

    # ---- recording

    def observe_stats(self, stats: EngineStats) -> None:
        """Record the engine's gauges, and its counts since its last message."""
        self._stats = stats
        counters = self._counters
        counters["prefix_cache_queries"] += stats.prefix_cache_queries
        counters["prefix_cache_hits"] += stats.prefix_cache_hits
        counters["external_prefix_cache_queries"] += stats.external_queries
        counters["external_prefix_cache_hits"] += stats.external_hits
        counters["num_preemptions"] += stats.num_preemptions
        counters["generation_tokens"] += stats.num_generation_tokens
        counters["encoder_embeddings"] += stats.num_encoded
        if stats.tiers is not None:
            self.tiers.observe(stats.tiers, self._histograms)
        if stats.num_drafts:
            counters["spec_decode_num_drafts"] += stats.num_drafts
            counters["spec_decode_num_draft_tokens"] += stats.num_draft_tokens
            counters["spec_decode_num_accepted_tokens"] += sum(stats.accepted_per_position)
            self._add_accepted(stats.accepted_per_position)
        steps = self._histograms["iteration_tokens_total"]
        for num_tokens in stats.iteration_tokens:
            steps.observe(num_tokens)

    def observe_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count a processed prompt."""
        self._counters["prompt_tokens"] += num_prompt_tokens
        self._counters["prompt_tokens_cached"] += num_cached_tokens

    def observe_medium(self, num_tokens: int, found: bool, seconds: float) -> None:
        """Count an image or a video of a request: `found` among the preprocessed ones, or preprocessed in `seconds`."""
        self._counters["prompt_image_tokens"] += num_tokens
        self._counters["mm_cache_queries"] += 1
        self._counters["mm_cache_hits"] += found
        if not found:
            self._histograms["image_preprocessing_seconds"].observe(seconds)

    def observe_first_token(self, latency: float) -> None:
        """Observe a first token, `latency` seconds after the request arrived."""
        self._histograms["time_to_first_token_seconds"].observe(latency)

    def observe_tokens(self, interval: float, num_tokens: int) -> None:
        """Observe `num_tokens` that arrived `interval` seconds after the previous token of the sequence."""
        self._inter_token.observe(interval / num_tokens, num_tokens)

    def observe_request(
        self,
        request: GenerationRequest,
        finish_reason: str,
        num_output_tokens: int,
        first_token_time: float,
        timing: RequestTiming | None,
    ) -> None:
        """Count the end of a sequence. `request` is its GenerationRequest, `first_token_time` is 0 without a token."""
        self._finished[finish_reason] += 1
        if finish_reason not in ("stop", "length"):
            return
        now, histograms = time.time(), self._histograms
        histograms["e2e_request_latency_seconds"].observe(now - request.arrival_time)
        histograms["request_prompt_tokens"].observe(len(request.prompt_token_ids))
        histograms["request_generation_tokens"].observe(num_output_tokens)
        histograms["request_params_max_tokens"].observe(request.sampling.max_tokens)
        decode_time = now - first_token_time
        if timing is not None and timing.scheduled:
            decode_time = timing.finished - timing.first_token
            histograms["request_queue_time_seconds"].observe(timing.scheduled - timing.queued)
            histograms["request_inference_time_seconds"].observe(timing.finished - timing.scheduled)
            histograms["request_num_preemptions"].observe(timing.num_preemptions)
            histograms["request_prefill_kv_computed_tokens"].observe(timing.num_prefill_computed)
            if timing.first_token:
                histograms["request_prefill_time_seconds"].observe(timing.first_token - timing.scheduled)
                histograms["request_decode_time_seconds"].observe(decode_time)
        if first_token_time and num_output_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(decode_time / (num_output_tokens - 1))

    def observe_group(self, request: GenerationRequest, max_num_output_tokens: int) -> None:
        """Count the end of all n sequences of a request; `max_num_output_tokens` is the maximum over them."""
        self._histograms["request_params_n"].observe(request.n)
        self._histograms["request_max_num_generation_tokens"].observe(max_num_output_tokens)

    def observe_abort(self) -> None:
        """Count a sequence that the server or its client aborted."""
        self._finished["abort"] += 1

    def observe_http(self, handler: str, method: str, status: int) -> None:
        """Count an answered HTTP request. `handler` is the route, not the path: the number of paths is unbounded."""
        key = (handler, method, f"{status // 100}xx")
        self._http[key] = self._http.get(key, 0) + 1

    def observe_key(self, name: str, num_prompt: int, num_cached: int, num_output: int) -> None:
        """Count the end of a request of an API key and its tokens."""
        used = {"key_requests": 1, "key_prompt_tokens": num_prompt, "key_prompt_tokens_cached": num_cached}
        for metric, count in (used | {"key_generation_tokens": num_output}).items():
            self._count_key(metric, name, count)

    def observe_key_refusal(self, name: str, code: str) -> None:
        """Count a request that was refused at a limit of its API key."""
        self._count_key("key_requests_refused", name, 1, code)

    def _count_key(self, metric: str, name: str, count: int, code: str = "") -> None:
        self._keys[metric, name, code] = self._keys.get((metric, name, code), 0) + count

    def observe_evicted(self, num: int) -> None:
        """Count stored responses and conversations that were evicted."""
        self._counters["stored_objects_evicted"] += num

    def set_cache_config(self, **fields: object) -> None:
        """Publish labels of `cache_config_info`: the settings of the KV cache and the resulting sizes
        (`num_gpu_blocks`, `block_size`).
        """
        self._cache_config = {name: str(value) for name, value in fields.items()}

    # ---- aggregation

    def counts(self) -> Counts:
        """Return the counts so far, without gauges."""
        return Counts(
            dict(self._counters),
            dict(self._finished),
            list(self._http.items()),
            {name: (list(histogram.counts), histogram.total) for name, histogram in self._histograms.items()},
            list(self._keys.items()),
            list(self._accepted_per_position),
            dict(self.tiers.counts),
        )

    def add(self, counts: Counts) -> None:
        """Add the counts of another process, for the same model."""
        for name, count in counts.counters.items():
            self._counters[name] += count
        for reason, count in counts.finished.items():
            self._finished[reason] += count
        for key, count in counts.http:
            self._http[key] = self._http.get(key, 0) + count
        for key, count in counts.keys:
            self._count_key(key[0], key[1], count, key[2])
        for name, (buckets, total) in counts.histograms.items():
            self._histograms[name].add(buckets, total)
        self._add_accepted(counts.accepted_per_position)
        self.tiers.add(counts.tiers)

    def _add_accepted(self, counts: list[int]) -> None:
        accepted = self._accepted_per_position
        accepted += [0] * (len(counts) - len(accepted))
        for i, count in enumerate(counts):
            accepted[i] += count

    def plus(self, others: Iterable[Counts]) -> Metrics:
        """Return a new `Metrics` with our gauges, and the sum of our counts and `others`."""
        result = Metrics(*self._made_of)
        result._stats, result._cache_config = self._stats, self._cache_config
        result.max_loras = self.max_loras
        result.tiers.copy_gauges(self.tiers)
        for counts in (self.counts(), *others):
            result.add(counts)
        return result

    # ---- publishing

    def histogram(self, name: str) -> Histogram:
        """Return the histogram of this name, without a prefix."""
        return self._histograms[name]

    def render(self, view: View = ALL) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return render(self.registry, view)

    def collect(self) -> Iterator[Any]:
        """Collect the metrics, on each scrape of the registry."""
        http = CounterMetricFamily(
            "http_requests", "Requests answered, by route.", labels=["handler", "method", "status"]
        )
        for key, count in list(self._http.items()):  # the event loop may add to it meanwhile
            http.add_metric(key, count)
        yield http
        yield from self._key_metrics()
        for prefix in self._prefixes:
            yield from self._gauges(prefix)
            yield from self.tiers.collect(prefix, self)
            for name, value in self._counters.items():
                yield self.family(CounterMetricFamily, prefix + name, _COUNTERS[name], [({}, value)])
            yield self.family(
                CounterMetricFamily,
                prefix + "request_success",
                "Requests that ended, by how.",
                [({"finished_reason": reason}, count) for reason, count in self._finished.items()],
            )
            if self._accepted_per_position:
                yield self.family(
                    CounterMetricFamily,
                    prefix + "spec_decode_num_accepted_tokens_per_pos",
                    "Draft tokens that were accepted, by their place in the draft.",
                    [({"position": str(i)}, count) for i, count in enumerate(self._accepted_per_position)],
                )
            for name, histogram in self._histograms.items():
                if name in _OF_TIERS and not self.tiers.limits:
                    continue
                family = HistogramMetricFamily(prefix + name, _HISTOGRAMS[name][1], labels=list(self.labels))
                family.add_metric(list(self.labels.values()), histogram.buckets(), histogram.total)
                yield family

    def _key_metrics(self) -> Iterator[Any]:
        counts = list(self._keys.items())
        for metric, documentation in _OF_KEYS.items():
            samples = [(name, code, count) for (one, name, code), count in counts if one == metric]
            if not samples:
                continue
            labels = ["key", "code"] if metric == "key_requests_refused" else ["key"]
            family = CounterMetricFamily(f"quire:{metric}", documentation, labels=labels)
            for name, code, count in samples:
                family.add_metric([name, code][: len(labels)], count)
            yield family

    def _lora(self, prefix: str) -> GaugeMetricFamily:
        """Return the adapters of running and of waiting requests as labels; the value is the time, as in vLLM."""
        labels = {
            "max_lora": str(self.max_loras),
            "waiting_lora_adapters": ",".join(self._stats.waiting_adapters),
            "running_lora_adapters": ",".join(self._stats.running_adapters),
        }
        family = GaugeMetricFamily(
            prefix + "lora_requests_info", "LoRA adapters of running and waiting requests.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), time.time())
        return family

    def _gauges(self, prefix: str) -> Iterator[Any]:
        stats = self._stats
        if self.max_loras:
            yield self._lora(prefix)
        yield self.family(
            GaugeMetricFamily,
            prefix + "num_requests_running",
            "Requests in the engine's batch.",
            [({}, stats.num_running)],
        )
        yield self.family(
            GaugeMetricFamily,
            prefix + "num_requests_waiting",
            "Requests waiting to be scheduled.",
            [({}, stats.num_waiting)],
        )
        yield self.family(
            GaugeMetricFamily,
            prefix + "num_requests_waiting_by_reason",
            "Requests waiting to be scheduled, by why: for room (capacity), or for something else (deferred).",
            [({"reason": "capacity"}, stats.num_waiting), ({"reason": "deferred"}, 0)],
        )
        yield self.family(
            GaugeMetricFamily,
            prefix + "kv_cache_usage_perc",
            "Part of the KV cache in use, 0 to 1.",
            [({}, stats.kv_cache_usage)],
        )
        yield self.family(
            GaugeMetricFamily,
            prefix + "encoder_cache_usage_perc",
            "Part of the room for embeddings of images in use, 0 to 1.",
            [({}, stats.encoder_cache_usage)],
        )
        if self._cache_config:
            labels = {**self._cache_config, "engine": self.labels["engine"]}
            family = GaugeMetricFamily(
                prefix + "cache_config_info", "The KV cache's configuration, in the labels.", labels=list(labels)
            )
            family.add_metric(list(labels.values()), 1)
            yield family

    def family(self, cls: type, name: str, documentation: str, samples: list[tuple[dict[str, str], float]]) -> Any:
        """Return a family with one sample per (labels, value), in addition to the labels of all."""
        family = cls(name, documentation, labels=[*self.labels, *samples[0][0]])
        for labels, value in samples:
            family.add_metric([*self.labels.values(), *labels.values()], value)
        return family


_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Prompt tokens that the pool did not have, looked up in RAM and on disk.",
    "external_prefix_cache_hits": "Prompt tokens loaded from RAM or disk.",
    "num_preemptions": "Running requests that were put back to free memory.",
    "prompt_tokens": "Prompt tokens processed, found in the cache or computed.",
    "prompt_tokens_cached": "Prompt tokens that were found in the cache.",
    "generation_tokens": "Tokens generated.",
    "stored_objects_evicted": "Stored responses and conversations that made room for new ones.",
    "prompt_image_tokens": "Prompt tokens that are images or videos, of requests that began.",
    "mm_cache_queries": "Images looked up among the preprocessed ones.",
    "mm_cache_hits": "Images found among the preprocessed ones.",
    "spec_decode_num_drafts": "Drafts that steps verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that steps verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "encoder_embeddings": "Embeddings of images that the encoder computed.",
}
_OF_TIERS = ("kv_offload_store_size", "kv_offload_load_size")
_OF_KEYS = {
    "key_requests": "Requests accepted, by API key.",
    "key_prompt_tokens": "Prompt tokens of accepted requests, by API key.",
    "key_prompt_tokens_cached": "Prompt tokens that were found in the cache, by API key.",
    "key_generation_tokens": "Tokens generated, by API key.",
    "key_requests_refused": "Requests refused because a limit of their API key was reached, by key and error code.",
}
_HISTOGRAMS = {  # name: (bounds, or None for token counts up to the context length; help text)
    "time_to_first_token_seconds": (_FIRST_TOKEN, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (_NEXT_TOKEN, "Between consecutive tokens of a sequence."),
    "request_time_per_output_token_seconds": (_NEXT_TOKEN, "A sequence's mean time per token after its first."),
    "e2e_request_latency_seconds": (_LATENCY, "From a request's arrival to its end."),
    "image_preprocessing_seconds": (_FIRST_TOKEN, "For decoding and preprocessing an image."),
    "request_queue_time_seconds": (_LATENCY, "From entering the engine to first being scheduled."),
    "request_inference_time_seconds": (_LATENCY, "From first being scheduled to the last token."),
    "request_prefill_time_seconds": (_LATENCY, "From first being scheduled to the first token."),
    "request_decode_time_seconds": (_LATENCY, "From the first token to the last."),
    "request_prompt_tokens": (None, "Prompt tokens per request."),
    "request_generation_tokens": (None, "Generated tokens per sequence."),
    "request_max_num_generation_tokens": (None, "Generated tokens of the longest of a request's sequences."),
    "request_params_n": ((1, 2, 5, 10, 20), "The n that requests ask for."),
    "request_params_max_tokens": (None, "The max_tokens that requests ask for."),
    "iteration_tokens_total": (_STEP_TOKENS, "Tokens per engine step."),
    "request_num_preemptions": ((1, 2, 3, 4, 5, 10, 20), "Preemptions per sequence."),
    "kv_offload_store_size": (SIZES, "Bytes per transfer from the KV cache to RAM or disk."),
    "kv_offload_load_size": (SIZES, "Bytes per transfer from RAM or disk to the KV cache."),
    "request_prefill_kv_computed_tokens": (
        None,
        "Prompt tokens per sequence that were computed, not found in the cache.",
    ),
}
