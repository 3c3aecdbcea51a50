"""The text format that Prometheus reads: families of samples, and histograms.

Names get the prefix ``pdserve:``; vLLM's names follow it where the thing is the same. Owns the
format, not what is counted.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

Labels = Mapping[str, str]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "pdserve:"
NO_LABELS: Labels = {}


class Histogram:
    """Observations by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: Labels = NO_LABELS) -> Iterator[str]:
        """``name`` with its prefix."""
        inner = _inner(labels)
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{inner}{"," if inner else ""}le="{bound}"}} {total}'
        braces = f"{{{inner}}}" if inner else ""
        yield f"{name}_sum{braces} {self._sum}"
        yield f"{name}_count{braces} {total}"


def family(
    name: str,
    kind: str,
    text: str,
    samples: Iterable[tuple[Labels, float]],
    *,
    prefix: str = PREFIX,
) -> Iterator[str]:
    """A metric with all its samples."""
    yield from _head(prefix + name, kind, text)
    for labels, value in samples:
        inner = _inner(labels)
        yield f"{prefix}{name}{{{inner}}} {value}" if inner else f"{prefix}{name} {value}"


def histogram_family(
    name: str, text: str, histograms: Iterable[tuple[Labels, Histogram]]
) -> Iterator[str]:
    """A metric whose samples are histograms."""
    yield from _head(PREFIX + name, "histogram", text)
    for labels, histogram in histograms:
        yield from histogram.lines(PREFIX + name, labels)


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _inner(labels: Labels) -> str:
    return ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
