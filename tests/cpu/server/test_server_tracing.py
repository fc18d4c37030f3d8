"""OpenTelemetry: a span per request, as a collector receives it."""

import http.server
import sys
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving_fakes import FakeService, Running

from warpbus.errors import EngineDiedError, UsageError
from warpbus.server.options import ServerOptions
from warpbus.server.registry import Models
from warpbus.server.tracing import tracer

CHAT = {"model": "parrot", "messages": [{"role": "user", "content": "a secret"}]}
PATH = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    """A collector, with the spans that it has got."""
    spans = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                pytest.fail("compressed without being asked")
            asked = ExportTraceServiceRequest.FromString(body)
            spans.extend(span for each in asked.resource_spans for scope in each.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.url, server.spans = f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        yield server
        server.shutdown()


def attributes(span):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_request_is_a_span_in_the_trace_of_its_client(collector):
    models, service = Models(), FakeService()
    models.add("parrot", service)
    with (
        tracer(collector.url) as traced,
        Running(models, ServerOptions(), traced) as running,
        running.http() as client,
    ):
        client.post(PATH, json=CHAT, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        client.get("/health")
        client.get("/nothing")
        service.fails = (3, EngineDiedError("it died"))
        client.post(PATH, json={**CHAT, "stream": True})
    answered, missing, failed = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert (answered.name, answered.trace_id.hex(), answered.parent_span_id.hex()) == (f"POST {PATH}", TRACE, PARENT)
    found = attributes(answered)
    assert found.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert found == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": PATH,
        "url.path": PATH,
        "gen_ai.request.model": "parrot",
        "gen_ai.usage.input_tokens": len(service.asked[0][0]),
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 9,
    }
    assert answered.end_time_unix_nano > answered.start_time_unix_nano
    assert (missing.name, attributes(missing)["http.response.status_code"]) == ("GET", 404)
    assert missing.parent_span_id == b""
    assert attributes(failed)["error.type"] == "engine_unavailable"
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert "secret" not in str(collector.spans)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match=r"pip install 'warpbus\[otel\]'"), tracer("http://127.0.0.1:1"):
        pass
    with pytest.raises(UsageError, match=r"--otlp-endpoint 127\.0\.0\.1:4318: give a URL"):
        ServerOptions(otlp_endpoint="127.0.0.1:4318")
