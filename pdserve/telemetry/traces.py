"""Spans of requests, as the parts of pdserve see them. What makes them real is loaded by name.

Without ``observability.tracing`` there is no tracer, and nothing of OpenTelemetry is imported.
A span is carried to the next process as a W3C ``traceparent``.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from pdserve.core.errors import ConfigError
from pdserve.core.observability_config import ObservabilityConfig
from pdserve.core.plugin import load_plugin

Attributes = Mapping[str, str | int | float | bool]

CLOSE_TIMEOUT_S = 3.0  # for what is left to be sent

TRACERS = {"otel": "pdserve.telemetry.otel_tracer:start_tracer"}


class Span(Protocol):
    """One process's part of a request, begun and not ended. Times are of the process's clock."""

    @property
    def traceparent(self) -> str:
        """For the parts of it that other processes do."""

    def stage(self, name: str, *, start_s: float, end_s: float) -> None:
        """A stage within it that is over."""

    def end(self, *, end_s: float, attributes: Attributes, error: str | None) -> None:
        """It is over; ``error`` says by what, if not by success."""


class Tracer(Protocol):
    """Begins spans and sees to it that they get where they are wanted, without making anybody
    wait.
    """

    def start(
        self, name: str, *, parent: str | None, start_s: float, attributes: Attributes
    ) -> Span:
        """``parent``: a traceparent. One that is none counts as none."""

    def close(self) -> None:
        """Send what is left. Takes seconds where nobody answers."""


def tracer_for(config: ObservabilityConfig, process: str) -> Tracer | None:
    """The tracer of this process, if it is to have one. Raises ConfigError."""
    return make_tracer(process) if config.tracing else None


async def close_tracer(tracer: Tracer) -> None:
    """Send what is left; what cannot be sent in time is lost."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await asyncio.to_thread(tracer.close)


def make_tracer(process: str) -> Tracer:
    """The tracer of this process. Raises ConfigError where OpenTelemetry is not installed."""
    try:
        start = load_plugin(TRACERS["otel"])
    except ImportError as error:
        raise ConfigError(
            f"observability.tracing: {error}; it needs pip install 'pdserve[otel]'"
        ) from error
    tracer: Tracer = start(process)
    return tracer
