"""Spans by OpenTelemetry's SDK, sent by OTLP from a thread of their own. Loaded by name.

Where they go and which are kept is said by the standard variables (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_TRACES_SAMPLER``, ...), which the SDK reads itself.
"""

import time

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve.core.environment import otlp_protocol
from pdserve.core.errors import ConfigError
from pdserve.telemetry.traces import Attributes, Tracer

SERVICE_NAME = "pdserve"
_PROPAGATOR = TraceContextTextMapPropagator()
_EXPORTERS: dict[str, type[GrpcExporter] | type[HttpExporter]] = {
    "grpc": GrpcExporter,
    "http/protobuf": HttpExporter,
}


class OtelSpan:
    """A ``Span``. ``epoch_ns``: Unix time at the zero of the clock that all of its times are by."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, epoch_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._epoch_ns = epoch_ns

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier["traceparent"]

    def stage(self, name: str, *, start_s: float, end_s: float) -> None:
        if self._span.is_recording():
            span = self._tracer.start_span(
                name, trace.set_span_in_context(self._span), start_time=self._unix_ns(start_s)
            )
            span.end(self._unix_ns(end_s))

    def end(self, *, end_s: float, attributes: Attributes, error: str | None) -> None:
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(self._unix_ns(end_s))

    def _unix_ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + _ns(monotonic_s)


class OtelTracer:
    """A ``Tracer``, with a provider of its own: several may live in one process."""

    def __init__(self, process: str, exporter: SpanExporter) -> None:
        # service.name of OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES goes before ours.
        told = Resource.create()
        name = told.attributes.get("service.name", "")
        own = {"service.instance.id": process}
        if str(name).startswith("unknown_service"):
            own["service.name"] = SERVICE_NAME
        self._provider = TracerProvider(resource=told.merge(Resource(own)), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pdserve")

    def start(
        self, name: str, *, parent: str | None, start_s: float, attributes: Attributes
    ) -> OtelSpan:
        carrier = {} if parent is None else {"traceparent": parent}
        epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            _PROPAGATOR.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=dict(attributes),
            start_time=epoch_ns + _ns(start_s),
        )
        return OtelSpan(self._tracer, span, epoch_ns)

    def close(self) -> None:
        self._provider.shutdown()


def start_tracer(process: str) -> Tracer:
    """A tracer that sends by OTLP. Raises ConfigError for a protocol that there is not."""
    protocol = otlp_protocol()
    if protocol not in _EXPORTERS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL: got {protocol!r}, allowed are {', '.join(_EXPORTERS)}"
        )
    return OtelTracer(process, _EXPORTERS[protocol]())


def _ns(monotonic_s: float) -> int:
    return round(monotonic_s * 1e9)
