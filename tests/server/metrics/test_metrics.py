"""Names, types, labels and values of the Prometheus metrics; the log line."""

import asyncio
import logging

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.messages import EngineStats, RequestTiming, SamplingParams, TierStats
from quire.server.metrics.metrics import Counts, Histogram, Metrics
from quire.server.metrics.stats_log import StatsLog
from quire.server.request.generation_request import GenerationRequest

GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "cache_config_info",
}
COUNTERS = {
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "request_success",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
}


def families(metrics):
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def sample(metrics, name, **labels):
    """The value of one series; names as scraped."""
    for family in families(metrics).values():
        for s in family.samples:
            if s.name == name and labels.items() <= s.labels.items():
                return s.value
    raise KeyError(name)


@pytest.fixture
def metrics():
    metrics = Metrics("org/model", 3000)
    metrics.set_cache_config(block_size=16, num_gpu_blocks=100, enable_prefix_caching=True)
    return metrics


def request(**fields):
    return GenerationRequest("r", [1] * 7, SamplingParams(max_tokens=40), arrival_time=0.0, **fields)


def test_names_types_and_labels(metrics):
    found = families(metrics)
    for prefix in ("quire:", "vllm:"):
        for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
            assert {name: found[prefix + name].type for name in names} == dict.fromkeys(names, kind)
    for name, family in found.items():
        if ":" in name and not name.endswith("cache_config_info"):
            for s in family.samples:
                assert s.labels["model_name"] == "org/model" and s.labels["engine"] == "0"
    assert found["vllm:cache_config_info"].samples[0].labels == {
        "block_size": "16",
        "num_gpu_blocks": "100",
        "enable_prefix_caching": "True",
        "engine": "0",
    }
    assert {s.name for s in found["vllm:prompt_tokens"].samples} == {"vllm:prompt_tokens_total"}
    assert {s.labels["finished_reason"] for s in found["vllm:request_success"].samples} == {
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    }


@pytest.mark.slow
def test_tiers_have_vllms_names_and_one_series_per_tier(metrics):
    assert not any("kv_offload" in name or "kv_tier" in name for name in families(metrics))
    metrics.tiers.limits = {"ram": 1000, "disk": 5000}
    counts = {"store_bytes": 300, "store_time": 0.5, "load_bytes": 7, "disk_read_bytes": 4, "ram_evicted": 2}
    for _ in range(2):
        metrics.observe_stats(EngineStats(tiers=TierStats({"ram": 250, "disk": 40}, counts, [100, 200], [7])))
    metrics.observe_stats(EngineStats())
    for prefix in ("quire:", "vllm:"):
        offload = f"{prefix}kv_offload_"
        assert sample(metrics, f"{offload}store_bytes_total") == 600
        assert sample(metrics, f"{offload}total_bytes_total", transfer_type="GPU_to_CPU") == 600
        assert sample(metrics, f"{offload}total_bytes_total", transfer_type="CPU_to_GPU") == 14
        assert sample(metrics, f"{offload}total_time_total", transfer_type="GPU_to_CPU") == 1
        assert sample(metrics, f"{offload}size_count", transfer_type="GPU_to_CPU") == 4
        assert sample(metrics, f"{offload}load_size_sum") == 14
        assert sample(metrics, f"{offload}cpu_cache_usage_perc") == 0.25
        assert sample(metrics, f"{prefix}kv_tier_used_bytes", tier="disk") == 40
        assert sample(metrics, f"{prefix}kv_tier_limit_bytes", tier="ram") == 1000
        assert sample(metrics, f"{prefix}kv_tier_read_bytes_total", tier="disk") == 8
        assert sample(metrics, f"{prefix}kv_tier_evicted_total", tier="ram") == 4
    both = metrics.plus([metrics.counts()])
    assert sample(both, "vllm:kv_offload_store_bytes_total") == 1200
    assert sample(both, "vllm:kv_tier_used_bytes", tier="ram") == 250


def test_without_the_aliases():
    names = families(Metrics("m", 100, vllm_names=False))
    assert any(name.startswith("quire:") for name in names) and not any(name.startswith("vllm:") for name in names)


def test_buckets(metrics):
    found = families(metrics)

    def bounds(name):
        return [s.labels["le"] for s in found["vllm:" + name].samples if s.name.endswith("_bucket")]

    assert bounds("request_prompt_tokens") == [
        "1.0",
        "2.0",
        "5.0",
        "10.0",
        "20.0",
        "50.0",
        "100.0",
        "200.0",
        "500.0",
        "1000.0",
        "2000.0",
        "+Inf",
    ]
    assert bounds("time_to_first_token_seconds")[:3] == ["0.001", "0.005", "0.01"] and bounds(
        "time_to_first_token_seconds"
    )[-2:] == ["2560.0", "+Inf"]
    assert bounds("inter_token_latency_seconds")[0] == "0.01" and len(bounds("inter_token_latency_seconds")) == 20
    assert bounds("e2e_request_latency_seconds")[-2] == "7680.0"
    assert bounds("iteration_tokens_total")[-2] == "16384.0"
    assert bounds("request_params_n") == ["1.0", "2.0", "5.0", "10.0", "20.0", "+Inf"]


def test_histogram_counts_as_prometheus_does():
    reference_values = [0.5, 1, 1, 1.5, 2, 7]
    histogram = Histogram([1, 2, 5])
    for value in reference_values:
        histogram.observe(value)
    histogram.observe(2.0, count=2)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 7), ("5.0", 7), ("+Inf", 8)]
    assert histogram.total == sum(reference_values) + 4


@pytest.mark.slow
def test_engine_statistics(metrics):
    metrics.observe_stats(EngineStats(3, 2, 0.25, 100, 60, 1, 40, 7, [10, 37]))
    metrics.observe_stats(EngineStats(1, 0, 0.5, 10, 0, 0, 10, 3, [5]))
    assert sample(metrics, "vllm:num_requests_running") == 1
    assert (
        sample(metrics, "vllm:num_requests_waiting")
        == sample(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity")
        == 0
    )
    assert sample(metrics, "vllm:kv_cache_usage_perc") == 0.5
    assert (
        sample(metrics, "quire:prefix_cache_queries_total") == sample(metrics, "vllm:prefix_cache_queries_total") == 110
    )
    assert sample(metrics, "vllm:prefix_cache_hits_total") == 60
    assert sample(metrics, "vllm:num_preemptions_total") == 1
    assert sample(metrics, "vllm:generation_tokens_total") == 10
    assert (
        sample(metrics, "vllm:iteration_tokens_total_count") == 3
        and sample(metrics, "vllm:iteration_tokens_total_sum") == 52
    )
    assert sample(metrics, "vllm:iteration_tokens_total_bucket", le="16.0") == 2


@pytest.mark.slow
def test_a_finished_request(metrics, monkeypatch):
    monkeypatch.setattr("quire.server.metrics.metrics.time.time", lambda: 10.0)
    metrics.observe_prompt(7, 4)
    metrics.observe_first_token(0.3)
    metrics.observe_tokens(0.09, 3)
    timing = RequestTiming(
        queued=1.0, scheduled=1.5, first_token=2.0, finished=8.0, num_preemptions=2, num_prefill_computed=3
    )
    metrics.observe_request(request(), "length", 4, 2.1, timing)
    metrics.observe_group(request(n=2), 4)
    expected = {
        "time_to_first_token_seconds": 0.3,
        "e2e_request_latency_seconds": 10.0,
        "request_queue_time_seconds": 0.5,
        "request_inference_time_seconds": 6.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 6.0,
        "request_time_per_output_token_seconds": 2.0,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 4,
        "request_params_max_tokens": 40,
        "request_params_n": 2,
        "request_max_num_generation_tokens": 4,
        "request_num_preemptions": 2,
        "request_prefill_kv_computed_tokens": 3,
    }
    for name, value in expected.items():
        assert sample(metrics, f"vllm:{name}_sum") == pytest.approx(value), name
        assert sample(metrics, f"vllm:{name}_count") == 1, name
    assert sample(metrics, "vllm:inter_token_latency_seconds_count") == 3
    assert sample(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.05") == 3
    assert sample(metrics, "vllm:prompt_tokens_total") == 7 and sample(metrics, "vllm:prompt_tokens_cached_total") == 4
    assert sample(metrics, "vllm:request_success_total", finished_reason="length") == 1


def test_a_request_that_a_stop_string_ended(metrics, monkeypatch):
    monkeypatch.setattr("quire.server.metrics.metrics.time.time", lambda: 10.0)
    metrics.observe_request(request(), "stop", 5, 2.0, None)
    assert sample(metrics, "vllm:request_time_per_output_token_seconds_sum") == 2.0
    assert sample(metrics, "vllm:request_queue_time_seconds_count") == 0
    metrics.observe_request(request(), "error", 0, 0.0, None)
    metrics.observe_abort()
    assert (
        sample(metrics, "vllm:request_success_total", finished_reason="error")
        == sample(metrics, "vllm:request_success_total", finished_reason="abort")
        == 1
    )
    assert sample(metrics, "vllm:e2e_request_latency_seconds_count") == 1


def test_http_requests(metrics):
    for status in (200, 204, 404):
        metrics.observe_http("/v1/models", "GET", status)
    assert sample(metrics, "http_requests_total", handler="/v1/models", method="GET", status="2xx") == 2
    assert sample(metrics, "http_requests_total", status="4xx") == 1


def test_counts_of_several_are_added_up(metrics):
    """As between processes: gauges and engine counts come from one, request counts from all."""
    metrics.observe_stats(EngineStats(num_running=2, num_generation_tokens=5, iteration_tokens=[3, 2]))
    others = [Metrics("org/model", 3000) for _ in range(2)]
    for count, other in enumerate(others, 1):
        for _ in range(count):
            other.observe_first_token(0.03)
            other.observe_prompt(7, 2)
            other.observe_http("/v1/models", "GET", 200)
            other.observe_abort()
    received = msgspec.msgpack.decode(msgspec.msgpack.encode([other.counts() for other in others]), type=list[Counts])
    whole = metrics.plus(received)
    assert (
        sample(whole, "vllm:num_requests_running", engine="0") == 2
        and sample(whole, "vllm:generation_tokens_total") == 5
    )
    assert sample(whole, "vllm:time_to_first_token_seconds_count") == 3 and sample(
        whole, "vllm:time_to_first_token_seconds_sum"
    ) == pytest.approx(0.09)
    assert (
        sample(whole, "vllm:time_to_first_token_seconds_bucket", le="0.02") == 0
        and sample(whole, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 3
    )
    assert sample(whole, "vllm:prompt_tokens_total") == 21 and sample(whole, "vllm:prompt_tokens_cached_total") == 6
    assert (
        sample(whole, "http_requests_total", handler="/v1/models") == 3
        and sample(whole, "vllm:request_success_total", finished_reason="abort") == 3
    )
    assert sample(whole, "vllm:cache_config_info", num_gpu_blocks="100") == 1
    assert sample(metrics, "vllm:prompt_tokens_total") == 0  # unchanged


class TestLog:
    def lines(self, caplog, log, *times):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="quire.stats"):
            for now in times:
                log.log(log._since + now)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    def test_wording(self, caplog):
        log = StatsLog(10.0, "cuda")
        log.observe(EngineStats(4, 2, 0.123, 100, 25, 3, 1000, 55, []))
        assert self.lines(caplog, log, 10.0) == [
            (
                "INFO",
                "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 5.5 tokens/s, "
                "Running: 4 reqs, Waiting: 2 reqs, "
                "Preemptions: 3, GPU KV cache usage: 12.3%, Prefix cache hit rate: 25.0%",
            )
        ]

    def test_quiet_when_idle(self, caplog):
        log = StatsLog(10.0)
        assert [level for level, _ in self.lines(caplog, log, 10)] == ["DEBUG"]
        log.observe(EngineStats(1, 0, 0.5, 0, 0, 0, 3, 1, []))
        log.observe(EngineStats())
        ((level, text),) = self.lines(caplog, log, 10)
        assert (
            level == "INFO"
            and "CPU KV cache usage: 0.0%" in text
            and "Preemptions" not in text
            and "hit rate" not in text
        )
        assert [level for level, _ in self.lines(caplog, log, 10, 10)] == ["INFO", "DEBUG"]

    def test_interval(self, caplog):
        async def main(interval):
            task = asyncio.create_task(StatsLog(interval).run())
            await asyncio.sleep(0.2)
            task.cancel()

        with caplog.at_level(logging.DEBUG, logger="quire.stats"):
            asyncio.run(main(0.0))
            assert not caplog.records
            asyncio.run(main(0.05))
            assert len(caplog.records) >= 2
