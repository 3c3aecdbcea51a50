"""Numbers about routing: where prompts were sent and by which rule, and how far predictions were
from what was seen.
"""

from collections import Counter
from collections.abc import Iterator

from pdserve.telemetry.exposition import NO_LABELS, Histogram, family, histogram_family
from router.policy import Place

RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class RoutingMetrics:
    """Counted where legs start and end."""

    def __init__(self) -> None:
        self._places: Counter[Place] = Counter(dict.fromkeys(Place, 0))
        self._ttft = Histogram(RATIO_BOUNDS)
        self._tpot = Histogram(RATIO_BOUNDS)

    def placed(self, place: Place) -> None:
        self._places[place] += 1

    def ttft_seen(self, seen_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._ttft.observe(seen_s / predicted_s)

    def tpot_seen(self, seen_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._tpot.observe(seen_s / predicted_s)

    def lines(self) -> Iterator[str]:
        """In Prometheus' text format."""
        yield from family(
            "route_decisions_total",
            "counter",
            "Legs by where they were sent to be prefilled and the rule that said so.",
            [
                ({"planned": "local" if place.is_local else "disaggregated", "rule": place}, count)
                for place, count in self._places.items()
            ],
        )
        for name, text, histogram in (
            ("ttft_seen_over_predicted", "Routing to first token: seen / predicted.", self._ttft),
            ("tpot_seen_over_predicted", "Time between tokens: seen / predicted.", self._tpot),
        ):
            yield from histogram_family(name, text, [(NO_LABELS, histogram)])
