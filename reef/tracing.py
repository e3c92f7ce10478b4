"""OpenTelemetry spans, where `observability.trace-endpoint` asks for them; a call that does nothing otherwise.

::

    request ──┬─► engine generation (one for each choice)      training step
              └─► append                                       publication

A client's `traceparent` (W3C Trace Context) is the parent of its request's span.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from reef.errors import ConfigError

_OFF: AbstractContextManager[None] = nullcontext()
_tracer: Any = None
_provider: Any = None


def span(name: str, **attributes: str | int) -> AbstractContextManager[Any]:
    """A span around a block; the block gets None where nothing is traced."""
    if _tracer is None:
        return _OFF
    named = {f"reef.{key}": value for key, value in attributes.items()}
    found: AbstractContextManager[Any] = _tracer.start_as_current_span(name, attributes=named)
    return found


def request_span(method: str, headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[Any]:
    """The span of one HTTP request, below the client's own if it sent one."""
    if _tracer is None:
        return _OFF
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name[:5] == b"trace"}
    found: AbstractContextManager[Any] = _tracer.start_as_current_span(
        method, context=extract(carrier), kind=SpanKind.SERVER, attributes={"http.request.method": method}
    )
    return found


def send_to(endpoint: str) -> None:
    """Export spans by OTLP over HTTP. Raises ConfigError without the extra `otel`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"observability.trace-endpoint needs pip install 'reef[otel]': {error}") from error
    process(BatchSpanProcessor(OTLPSpanExporter(endpoint)))


def process(processor: Any) -> None:
    """Hand every span that ends to an OpenTelemetry span processor; its environment variables (OTEL_*) count."""
    global _tracer, _provider
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource({SERVICE_NAME: "reef"}).merge(OTELResourceDetector().detect())
    _provider = TracerProvider(resource=resource)
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("reef")


def close() -> None:
    """Send what is left, and trace nothing any more."""
    global _tracer, _provider
    provider, _tracer, _provider = _provider, None, None
    if provider is not None:
        provider.shutdown()
