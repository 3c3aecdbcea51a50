"""The section ``observability`` of the cluster file: what the processes tell of themselves."""

from dataclasses import dataclass

from pdserve.core.config_checks import one_of

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Metrics of the router are always there: they are its ``/metrics``."""

    log_format: str = "text"  # json: one object a line, with the request's id
    node_metrics: bool = True  # each node serves its own numbers over HTTP, on a port of the range
    tracing: bool = False  # spans by OpenTelemetry; where they go, OTEL_ variables say

    def __post_init__(self) -> None:
        one_of("observability.log_format", self.log_format, LOG_FORMATS)
