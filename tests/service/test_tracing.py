"""Spans as OpenTelemetry's own in-memory exporter sees them, and as a collector gets them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.load import RECEIPT, Gateway, provider
from reef import tracing
from reef.config import resolve
from reef.errors import ConfigError
from tests.scenario.harness import Harness
from tests.scenario.test_scenario import run as run_scenario
from tests.service.conftest import Running

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    found = InMemorySpanExporter()
    tracing.process(SimpleSpanProcessor(found))
    yield found
    tracing.close()


def spans_of(exporter: InMemorySpanExporter, count: int) -> dict:
    """Waits: a request's span ends when its client has the answer already."""
    for _ in range(5000):
        found = exporter.get_finished_spans()
        if len(found) >= count:
            return {span.name: span for span in found}
        time.sleep(0.02)
    raise AssertionError([span.name for span in found])


def test_a_request_has_its_generation_and_its_append_below_it(exporter, gateway: Running):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine", "x-reef-scenario": "traced"}
    response = gateway.chat(headers=headers)
    found = spans_of(exporter, 3)
    request = found["POST /v1/chat/completions"]
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == PARENT
    receipt = response.headers["x-reef-agent-record-id"]
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "reef.request_id": "mine",
        "reef.scenario": "traced",
        "reef.receipt": receipt,
    }
    for name in ("engine generation", "append"):
        assert found[name].parent.span_id == request.context.span_id
        assert request.start_time <= found[name].start_time <= found[name].end_time <= request.end_time
    [record] = gateway.records("traced", kind="inference")
    [generation] = record["generations"]
    traced = found["engine generation"].attributes
    assert traced["reef.prompt_tokens"] == len(generation["prompt_ids"]) and traced["reef.ending"] == "stop"
    assert traced["reef.output_tokens"] == len(generation["output_ids"])
    assert found["append"].attributes["reef.record_id"] == receipt


def test_each_choice_is_a_generation_and_a_refused_request_has_none(exporter, gateway: Running):
    gateway.chat(n=3)
    assert gateway.chat(messages=[]).status_code == 400
    spans_of(exporter, 6)
    names = sorted(span.name for span in exporter.get_finished_spans())
    assert names == ["POST /v1/chat/completions"] * 2 + ["append"] + ["engine generation"] * 3
    requests = [span for span in exporter.get_finished_spans() if span.name.startswith("POST")]
    refused = max(requests, key=lambda span: span.start_time)
    assert refused.attributes["http.response.status_code"] == 400 and refused.parent is None


def test_a_step_and_its_publication(exporter, tmp_path):
    async def body(reef: Harness) -> None:
        await reef.feedback("a", 1.0)
        await reef.feedback("b", 0.0)
        await reef.released(1)

    run_scenario(body, tmp_path)
    found = {span.name: span for span in exporter.get_finished_spans() if span.name != "append"}
    assert set(found) == {"training step", "publication"}
    assert found["training step"].attributes["reef.samples"] == 2
    assert found["training step"].end_time <= found["publication"].start_time
    assert all(span.attributes["reef.scenario"] == "s" and span.parent is None for span in found.values())


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted to it, in the server's `received`."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, self.headers["content-type"], body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


def test_a_collector_gets_the_spans_of_a_service(tmp_path: Path):
    traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with HTTPServer(("127.0.0.1", 0), Collector) as collector, provider() as upstream:
        collector.received = []  # type: ignore[attr-defined]
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        gateway = Gateway(0, tmp_path, {"inference.upstream-url": upstream, "observability.trace-endpoint": endpoint})
        try:
            gateway.start()
            asked = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}
            answer = httpx.post(f"{gateway.server.url}/v1/chat/completions", json=asked, timeout=60)
        finally:
            gateway.stop()  # and with it what was not sent yet
            collector.shutdown()
    spans = {}
    for path, kind, body in collector.received:  # type: ignore[attr-defined]
        assert (path, kind) == ("/v1/traces", "application/x-protobuf")
        for resource in traces.ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            assert named["service.name"] == "reef"
            spans |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    request, append = spans["POST /v1/chat/completions"], spans["append"]
    assert append.trace_id == request.trace_id and append.parent_span_id == request.span_id
    named = {one.key: one.value.string_value for one in request.attributes}
    assert named["reef.receipt"] == answer.headers[RECEIPT]


def test_off_is_one_call_that_makes_nothing(gateway: Running):
    assert tracing.span("append", kind="x") is tracing.span("publication") is tracing.request_span("GET", [])
    assert gateway.chat().status_code == 200


def test_an_endpoint_that_is_no_url_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"observability\.trace-endpoint must begin with http:// or https://"):
        resolve(file=None, environ={}, flags={"inference.model-path": "m", "observability.trace-endpoint": "here:1"})
