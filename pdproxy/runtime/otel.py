"""Spans by OpenTelemetry: one for each request, round and leg; needs the extra `otel`.

Rule: this module is imported only with --tracing. A span says who, when and how it ended, never
what was asked or answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdproxy import __version__
from pdproxy.core.headers import HeaderList
from pdproxy.dispatch.tracing import Attributes
from pdproxy.errors import PDProxyError

_PROPAGATOR = TraceContextTextMapPropagator()
_FIELDS = _PROPAGATOR.fields
# What the library calls a service that nobody named.
_UNNAMED = "unknown_service"


class TracedSpan:
    """A span of OpenTelemetry, as dispatch knows spans."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @contextmanager
    def child(self, name: str, attributes: Attributes) -> Iterator[TracedSpan]:
        """Run a block in a span inside this one."""
        parent = set_span_in_context(self._span)
        with _spanning(self._tracer, name, SpanKind.CLIENT, parent, attributes) as span:
            yield span

    def note(self, attributes: Attributes) -> None:
        """Add what has become known."""
        self._span.set_attributes(attributes)
        if "error.type" in attributes:
            self._span.set_status(StatusCode.ERROR, str(attributes["error.type"]))

    def carry(self, headers: HeaderList) -> HeaderList:
        """Put this span's trace context in place of the client's."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        return [pair for pair in headers if pair[0] not in _FIELDS] + list(carrier.items())


class RequestTracer:
    """Begins the span of each request, within the client's trace if it sent one."""

    def __init__(self, provider: TracerProvider) -> None:
        """Make spans by a provider."""
        self._tracer = provider.get_tracer("pdproxy", __version__)

    @contextmanager
    def request(
        self, name: str, headers: Mapping[str, str], attributes: Attributes
    ) -> Iterator[TracedSpan]:
        """Run a block in the span of a request with these headers."""
        carrier = {field: headers[field] for field in _FIELDS if field in headers}
        parent = _PROPAGATOR.extract(carrier, Context())
        with _spanning(self._tracer, name, SpanKind.SERVER, parent, attributes) as span:
            yield span


@contextmanager
def _spanning(
    tracer: Tracer, name: str, kind: SpanKind, parent: Context, attributes: Attributes
) -> Iterator[TracedSpan]:
    span = tracer.start_span(name, parent, kind, attributes)
    try:
        yield TracedSpan(tracer, span)
    except PDProxyError as error:
        span.set_status(StatusCode.ERROR, error.code)
        raise
    except BaseException:  # the client left, or a bug that is logged elsewhere
        span.set_status(StatusCode.ERROR, "cancelled")
        raise
    finally:
        span.end()


@asynccontextmanager
async def exporting() -> AsyncIterator[RequestTracer]:
    """Export to where OpenTelemetry's own variables point, such as OTEL_EXPORTER_OTLP_ENDPOINT."""
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield RequestTracer(provider)
    finally:
        # It sends what is left, and may wait for a collector that does not answer.
        await asyncio.to_thread(provider.shutdown)


def _resource() -> Resource:
    given = Resource.create({SERVICE_VERSION: __version__})
    if str(given.attributes.get(SERVICE_NAME, "")).startswith(_UNNAMED):
        return given.merge(Resource({SERVICE_NAME: "pdproxy"}))
    return given
