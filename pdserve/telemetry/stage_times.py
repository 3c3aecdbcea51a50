"""How long the stages of requests took, by stage (``core/timeline.py`` names them)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from pdserve.core.timeline import STAGE_NAMES, Stage
from pdserve.telemetry.exposition import Histogram, Labels

BOUNDS_S = (0.0005, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0, 60.0)


class StageTimes:
    """Fed with the stages of each request that is over."""

    def __init__(self, names: Iterable[str] = STAGE_NAMES) -> None:
        self._histograms = {name: Histogram(BOUNDS_S) for name in names}

    def __getitem__(self, name: str) -> Histogram:
        return self._histograms[name]

    def observe(self, stages: Iterable[Stage]) -> None:
        """Each stage counts once, however often it had to be done."""
        durations_s: defaultdict[str, float] = defaultdict(float)
        for stage in stages:
            durations_s[stage.name] += stage.duration_s
        for name, duration_s in durations_s.items():
            self._histograms[name].observe(duration_s)

    def samples(self, labels: Labels) -> Iterator[tuple[Labels, Histogram]]:
        """For ``histogram_family``."""
        for name, histogram in self._histograms.items():
            yield {**labels, "stage": name}, histogram
