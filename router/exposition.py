"""The text format that Prometheus reads: families of samples, and histograms."""

import bisect
from collections.abc import Iterator, Mapping, Sequence

Labels = Mapping[str, str]


class Histogram:
    """Observations by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


def family(
    name: str, kind: str, text: str, samples: Sequence[tuple[Labels, float]]
) -> Iterator[str]:
    """A metric with all its samples."""
    yield from head(name, kind, text)
    for labels, value in samples:
        inner = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"pdserve:{name}{{{inner}}} {value}" if inner else f"pdserve:{name} {value}"


def head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP pdserve:{name} {text}"
    yield f"# TYPE pdserve:{name} {kind}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
