"""OpenTelemetry spans of requests, sent by OTLP over HTTP (--otlp-traces-endpoint; the extra `otel`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.engine.messages import RequestTiming

if TYPE_CHECKING:
    from quire.server.request.generation_request import GenerationRequest

_GIGA = 10**9


class Traces:
    """Spans are sent from a thread of the SDK, which its OTEL_ variables configure; a collector that does not answer
    delays no request.
    """

    def __init__(self, endpoint: str, model: str, version: str):
        """Raise ValueError for an endpoint of another protocol, and without the SDK."""
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        if protocol not in (None, "", "http/protobuf"):
            raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol}: traces are sent by http/protobuf only")
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint {endpoint}: traces go over HTTP, as to http://HOST:4318/v1/traces"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ValueError("--otlp-traces-endpoint needs the extra otel: pip install 'quire[otel]'") from None
        resource = Resource.create({SERVICE_NAME: "quire", "service.version": version})
        if resource.attributes[SERVICE_NAME] != "quire":  # OTEL_SERVICE_NAME
            resource = Resource.create({"service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("quire", version)
        self._model = model

    def record(
        self,
        headers: Mapping[str, str],
        requests: Sequence[GenerationRequest],
        arrived: float,
        started: float,
        ended: float,
        attributes: Mapping[str, Any],
    ) -> None:
        """Record a request that ended: a span, below that of the client's `traceparent` among its `headers`, with one
        for each phase of its first prompt: until it was `started`, its body was read and its prompt made. Times are
        seconds of time.time().
        """
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(headers),
            SpanKind.SERVER,
            {"gen_ai.provider.name": "quire", "gen_ai.request.model": self._model, "gen_ai.response.model": self._model}
            | _attributes(requests)
            | dict(attributes),
            start_time=int(arrived * _GIGA),
        )
        inside = set_span_in_context(span)
        timing = requests[0].timing if requests else None
        pools = bool(requests) and requests[0].pooling is not None
        phases = [("tokenize", arrived, started), *(_phases(timing, pools) if timing is not None else [])]
        for name, begin, end in phases:
            child = self._tracer.start_span(name, inside, start_time=int(begin * _GIGA))
            child.end(int(end * _GIGA))
        span.end(int(ended * _GIGA))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    if not requests:
        return {}
    sampling = requests[0].sampling
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": requests[0].n,
    }


def _phases(timing: RequestTiming, pools: bool) -> list[tuple[str, float, float]]:
    """Return (name, begin, end) of each phase. `encode` is the work of an encoder: a text's vector, or the images of a
    prompt.
    """
    scheduled, first = timing.scheduled or timing.finished, timing.first_token or timing.finished
    phases = [("queue", timing.queued, scheduled), ("encode" if pools else "prefill", scheduled, first)]
    phases += [("encode", *timing.encoded)] if timing.encoded else []
    phases.append(("decode", first, timing.finished))
    return [phase for phase in phases if phase[2] > phase[1]]
