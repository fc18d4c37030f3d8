"""OpenTelemetry traces: a span per request, sent to a collector over OTLP and HTTP. Needs the extra `otel`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import warpbus
from warpbus.errors import UsageError
from warpbus.server.generation import RequestRecord


@contextmanager
def tracer(endpoint: str) -> Iterator[Any]:
    """An OpenTelemetry tracer that sends spans to a collector; those that wait are sent at the end of the block.

    Args:
        endpoint: the URL of the collector for traces, such as http://127.0.0.1:4318/v1/traces.

    Raises:
        UsageError: OpenTelemetry is not installed.
    """
    try:
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise UsageError(f"--otlp-endpoint needs {error.name}, which is missing: pip install 'warpbus[otel]'") from None
    resource = resources.Resource.create({"service.name": "warpbus", "service.version": warpbus.__version__})
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield provider.get_tracer("warpbus.server", warpbus.__version__)
    finally:
        provider.shutdown()


class Traces:
    """A span per request, in the trace that its `traceparent` header names (W3C Trace Context).

    Names are those of OpenTelemetry's semantic conventions for HTTP and for generative AI. Texts are never recorded.

    Args:
        app: the traced application; an `AccessLog` is around it.
        tracer: see `tracer`.
    """

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        self._app = app
        self._tracer = tracer
        self._trace = importlib.import_module("opentelemetry.trace")
        self._extract = importlib.import_module("opentelemetry.propagate").extract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/health", "/metrics"):
            await self._app(scope, receive, send)
            return
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"][:200]}
        span = self._tracer.start_span(
            scope["method"],
            context=self._extract(dict(Headers(scope=scope))),
            kind=self._trace.SpanKind.SERVER,
            attributes=attributes,
        )

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(self._trace.StatusCode.ERROR)
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        finally:
            self._describe(span, scope)
            span.end()

    def _describe(self, span: Any, scope: Scope) -> None:
        record = RequestRecord.of(scope)
        route = getattr(scope.get("route"), "path", None)
        if route is not None:
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
        if record.model is not None:
            span.set_attribute("gen_ai.request.model", record.model)
        if record.prompt_tokens:
            span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", record.cached_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", record.output_tokens)
        if record.first_token is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", record.first_token)
        if record.error is not None:
            span.set_attribute("error.type", record.error)
            span.set_status(self._trace.StatusCode.ERROR)
