"""Traces, as an OTLP collector receives them."""

from __future__ import annotations

import itertools
import re
import string
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.engine.messages import RequestTiming
from quire.server.traces import _phases
from tests.helpers.server.running import MODEL, poll, running_server
from tests.server.media.conftest import FAKE, image_part, write_seeing_model

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            import gzip

            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
    server.shutdown()


def test_spans_of_a_request(model_folder, collector, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    url, spans = collector
    with running_server(model_folder, fake="step_delay=0.005", otlp_traces_endpoint=url) as server:
        server.wait_ready()
        body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "abc"}
        assert server.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        poll(lambda: len(spans) >= 5)
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"llm_request", "tokenize", "queue", "prefill", "decode"}
    root = by_name["llm_request"]
    assert all(span.trace_id.hex() == TRACE for span in spans) and root.parent_span_id.hex() == PARENT
    assert all(by_name[name].parent_span_id == root.span_id for name in by_name if name != "llm_request")
    got = {one.key: one.value for one in root.attributes}
    assert got["gen_ai.usage.output_tokens"].int_value == 5 and got["gen_ai.usage.input_tokens"].int_value > 0
    assert got["gen_ai.request.model"].string_value == MODEL and got["gen_ai.request.id"].string_value == "abc"
    assert [one.string_value for one in got["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    phases = [by_name[name] for name in ("tokenize", "queue", "prefill", "decode")]
    assert root.start_time_unix_nano == phases[0].start_time_unix_nano
    for before, after in itertools.pairwise(phases):
        assert before.start_time_unix_nano < before.end_time_unix_nano <= after.start_time_unix_nano + 1000
    assert "secret" not in str(spans)


def test_a_stop_string_an_image_and_a_vector_have_phases(collector, monkeypatch, tmp_path):
    """The server ends a request at a stop string, and the engine knows when the rest was."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    url, spans = collector
    folder = write_seeing_model(tmp_path)
    settings = {"max_model_len": "256", "otlp_traces_endpoint": url}
    with running_server(folder, fake=FAKE + ",step_delay=0.005", **settings) as server:
        server.wait_ready()
        content = [{"type": "text", "text": "What?"}, image_part()]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 200, "ignore_eos": True}
        body |= {"stop": list(string.ascii_letters + string.digits)[:60]}
        choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] in body["stop"]
        poll(lambda: "llm_request" in [span.name for span in spans])
        metrics = server.http.get("/metrics").text
    assert {span.name for span in spans} >= {"llm_request", "tokenize", "queue", "prefill", "encode"}
    assert re.search(r"^vllm:request_prefill_time_seconds_count\S* 1.0$", metrics, re.M)
    prefill, encode = (next(span for span in spans if span.name == name) for name in ("prefill", "encode"))
    assert prefill.start_time_unix_nano <= encode.start_time_unix_nano + 5_000_000
    assert encode.start_time_unix_nano < encode.end_time_unix_nano
    assert [name for name, *_ in _phases(RequestTiming(1.0, 2.0, 0.0, 3.0, 0, 5), True)] == ["queue", "encode"]


def test_another_protocol_of_the_environment(monkeypatch):
    from quire.server.traces import Traces

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ValueError, match=r"is grpc: .* http/protobuf only"):
        Traces("http://localhost:4318/v1/traces", "m", "1")


def test_an_endpoint_of_another_protocol():
    from quire.server.traces import Traces

    with pytest.raises(ValueError, match="over HTTP"):
        Traces("grpc://localhost:4317", "m", "1")
