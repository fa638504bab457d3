"""The routes of operations."""

from __future__ import annotations

from typing import Any

from quire.server.api.ops import cache, fleet, lora, profile, requests, sagemaker, status
from quire.server.api.ops.tokenizer_info import TokenizerInfo, tokenizer_info
from quire.server.http.route import EMPTY, Route

_UNREADY = {"503": status.Health}
ROUTES = [
    Route("GET", "/live", status.live, answer=status.Live),
    Route("GET", "/ready", status.ready, answer=status.Health, others=_UNREADY),
    Route("GET", "/health", status.ready, answer=status.Health, others=_UNREADY),
    Route("GET", "/version", status.version, answer=status.Version),
    Route("GET", "/metrics", status.metrics, answer="text/plain"),
    Route("GET", "/metrics/history", status.metrics_history, answer=status.MetricsHistory, admin=True),
    Route("GET", "/server_info", status.server_info, answer=status.ServerInfo, admin=True),
    Route("POST", "/reset_prefix_cache", status.reset_prefix_cache, answer=status.CacheReset, admin=True),
    Route("POST", "/v1/load_lora_adapter", lora.load, lora.LoadAdapter, "text/plain", admin=True),
    Route("POST", "/v1/unload_lora_adapter", lora.unload, lora.UnloadAdapter, "text/plain", admin=True),
    Route("DELETE", "/v1/cache/{key:path}", cache.free, answer=EMPTY, status=204),
    Route("GET", "/tokenizer_info", tokenizer_info, answer=TokenizerInfo),
    Route("GET", "/requests", requests.list_requests, answer=requests.RequestList, admin=True),
    Route("POST", "/abort_requests", requests.abort_requests, requests.AbortBody, answer=requests.Aborted, admin=True),
    Route("GET", "/load", requests.load, answer=requests.Load),
    Route("POST", "/start_profile", profile.start_profile, answer=profile.Profile, admin=True),
    Route("POST", "/stop_profile", profile.stop_profile, answer=profile.Profile, admin=True),
    Route("GET", "/get_server_info", fleet.server_info, answer=fleet.Instance, admin=True),
    Route("GET", "/kv_event_sources", fleet.kv_event_sources, answer=dict[str, Any], admin=True),
    Route("GET", "/health_generate", fleet.health_generate, answer=EMPTY),
    Route("POST", "/scale_elastic_ep", fleet.scale_elastic_ep, fleet.ScaleBody, fleet.Scaled, admin=True),
    Route("GET", "/is_sleeping", fleet.is_sleeping, answer=fleet.Sleeping),
    Route("POST", "/is_scaling_elastic_ep", fleet.is_scaling_elastic_ep, answer=fleet.Scaling),
    Route("GET", "/ping", sagemaker.ping, answer=EMPTY),
]
