"""A scrape as Prometheus reads it, by its own client's parser, and the rules that it is held to."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

UNITS = ("_seconds", "_bytes", "_tokens", "_blocks")
PLAIN_PREFIXES = ("pdserve:", "process_")


class Scrape:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]
        self.names = {sample.name for sample in self.samples} | {
            family.name + ("_total" if family.type == "counter" else "") for family in self.families
        }

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of ``pdserve:name`` that have these labels."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == f"pdserve:{name}" and labels.items() <= sample.labels.items()
        ]
        assert found, f"no sample of {name} with {labels}"
        return sum(found)

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """Upper bounds and cumulative counts of a histogram."""
        return [
            (float(sample.labels["le"]), sample.value)
            for sample in self.samples
            if sample.name == f"pdserve:{name}_bucket" and labels.items() <= sample.labels.items()
        ]


def problems(text: str) -> list[str]:
    """What promtool's lint, or a careful reader, would say of an exposition."""
    scrape = Scrape(text)
    found = list(_line_problems(text))
    for family in scrape.families:
        found += _family_problems(family)
    series = Counter((s.name, tuple(sorted(s.labels.items()))) for s in scrape.samples)
    found += [f"{key}: {count} times" for key, count in series.items() if count > 1]
    return found


def _line_problems(text: str) -> Iterator[str]:
    heads = [line.split(" ", 3)[:3] for line in text.splitlines() if line.startswith("# ")]
    for (_, kind, name), count in Counter(map(tuple, heads)).items():
        if count > 1:
            yield f"{name}: {count} lines of {kind}"
    if not text.endswith("\n"):
        yield "the last line does not end"


def _family_problems(family: Metric) -> Iterator[str]:
    name = family.name
    if not name.startswith(PLAIN_PREFIXES):
        yield f"{name}: no known prefix"
    if not family.documentation.endswith("."):
        yield f"{name}: no help"
    if family.type in {"untyped", "unknown"}:
        yield f"{name}: no type"
    if family.type != "counter" and name.endswith("_total"):
        yield f"{name}: _total, and no counter"
    if any(word in name for word in ("_ms", "milliseconds", "_kb", "_mb")):
        yield f"{name}: not a base unit"
    if family.type == "counter" and any(sample.value < 0 for sample in family.samples):
        yield f"{name}: a negative count"
    if family.type == "histogram":
        yield from _histogram_problems(family)


def _histogram_problems(family: Metric) -> Iterator[str]:
    by_labels: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    counts: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        key = tuple(sorted(labels.items()))
        if sample.name.endswith("_bucket"):
            by_labels.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[key] = sample.value
    for key, buckets in by_labels.items():
        bounds, values = zip(*buckets, strict=True)
        if list(bounds) != sorted(set(bounds)) or bounds[-1] != float("inf"):
            yield f"{family.name}{key}: bounds {bounds}"
        if list(values) != sorted(values) or values[-1] != counts.get(key):
            yield f"{family.name}{key}: counts {values} of {counts.get(key)}"
