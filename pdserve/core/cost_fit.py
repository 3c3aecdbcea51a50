"""Coefficients of ``seconds = a + b·x + c·y`` from measured steps, while more of them come.

Samples are kept by the size of x and y: each bucket holds its last few and speaks through the one
with the median time, so that a step which the machine disturbed counts for nothing once its bucket
has better ones, and many short steps do not drown the few long ones. A bucket that gets no samples
fades. The fit is least squares of relative errors, Huber-weighted, over coefficients ≥ 0. Pure.
"""

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

BUCKET_SAMPLES = 9
MAX_BUCKETS = 64
BUCKETS_PER_DOUBLING = 2
HALF_LIFE = 1000  # samples after which a bucket that got none of them counts half
HUBER_WIDTH = 0.15  # relative errors beyond it count less
NUM_ROUNDS = 4
LEAST_S, MOST_S = 1e-7, 1e5  # beyond them nothing was measured
LEAST_SIZE, MOST_SIZE = 1e-6, 1e15  # or none at all
TOLERANCE = 1.25  # a pace that changed by less has not changed
RIDGE = 1e-9  # picks one answer where samples leave several; far below what can be measured

Coefficients = tuple[float, float, float]


class Sample(NamedTuple):
    """Something of size (x, y) took so long."""

    seconds: float
    x: float
    y: float

    @property
    def is_real(self) -> bool:
        """Whether a clock can have meant it."""
        return LEAST_S <= self.seconds <= MOST_S and _is_size(self.x) and _is_size(self.y)

    @property
    def bucket(self) -> tuple[int, int]:
        return _size(self.x), _size(self.y)


class _Bucket:
    """The last samples of about one size."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=BUCKET_SAMPLES)
        self.last_at = 0  # how many samples had come when it got its last

    def median(self) -> Sample:
        ordered = sorted(self.samples)
        return ordered[(len(ordered) - 1) // 2]

    def stretch(self, factor: float) -> None:
        """All of it took so many times as long."""
        for _ in range(len(self.samples)):
            sample = self.samples.popleft()
            seconds = min(max(factor * sample.seconds, LEAST_S), MOST_S)
            self.samples.append(sample._replace(seconds=seconds))


class CostFit:
    """Fed with samples, asked for coefficients; a sample costs a microsecond, an answer about a
    millisecond.
    """

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[int, int], _Bucket] = OrderedDict()
        self._num_samples = 0

    def observe(self, seconds: float, x: float, y: float) -> None:
        """Something of size (x, y) took so long. What a clock cannot have meant is left out."""
        sample = Sample(seconds, x, y)
        if not sample.is_real:
            return
        key = sample.bucket
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        self._num_samples += 1
        bucket.last_at = self._num_samples
        bucket.samples.append(sample)

    def mend(self, samples: Iterable[Sample]) -> float:
        """A few sizes were tried again: bring all others to the pace that they show.

        What changes the pace of a machine (others that use it, its clock) changes it for steps of
        all sizes about alike, so what is known of the others is stretched by the factor that these
        tell, and only where it is more than TOLERANCE. Of trials of one size the fastest counts.
        Returns the factor; 1: nothing has changed.
        """
        fastest: dict[tuple[int, int], Sample] = {}
        for sample in filter(lambda each: each.is_real, samples):
            fastest[sample.bucket] = min(sample, fastest.get(sample.bucket, sample))
        ratios = [
            sample.seconds / self._buckets[key].median().seconds
            for key, sample in fastest.items()
            if key in self._buckets
        ]
        factor = statistics.median(ratios) if ratios else 1.0
        if 1 / TOLERANCE <= factor <= TOLERANCE:
            return 1.0
        for bucket in self._buckets.values():
            bucket.stretch(factor)
        for sample in fastest.values():
            self.observe(*sample)
        return factor

    def coefficients(self) -> Coefficients | None:
        """(a, b, c), all finite and ≥ 0; None before the first sample."""
        if not self._buckets:
            return None
        medians = [bucket.median() for bucket in self._buckets.values()]
        trusts = [
            len(bucket.samples) * 0.5 ** ((self._num_samples - bucket.last_at) / HALF_LIFE)
            for bucket in self._buckets.values()
        ]
        scale_x = max(sample.x for sample in medians) or 1.0
        scale_y = max(sample.y for sample in medians) or 1.0
        unit_s = max(sample.seconds for sample in medians)
        rows = []
        for sample in medians:
            ratio = unit_s / sample.seconds
            rows.append((ratio, ratio * sample.x / scale_x, ratio * sample.y / scale_y))
        a, b, c = _robust_fit(rows, trusts)
        return a * unit_s, b * unit_s / scale_x, c * unit_s / scale_y


def _is_size(value: float) -> bool:
    return value == 0 or LEAST_SIZE <= value <= MOST_SIZE


def _size(value: float) -> int:
    return round(BUCKETS_PER_DOUBLING * math.log2(1 + value))


def _robust_fit(rows: Sequence[Coefficients], trusts: Sequence[float]) -> Coefficients:
    """Coefficients for which every row comes nearest to 1, rows far from it counting less."""
    weights = list(trusts)
    fitted = (0.0, 0.0, 0.0)
    for _ in range(NUM_ROUNDS):
        fitted = _least_squares(rows, weights)
        for i, (row, trust) in enumerate(zip(rows, trusts, strict=True)):
            error = abs(sum(f * r for f, r in zip(fitted, row, strict=True)) - 1)
            weights[i] = trust * min(1.0, HUBER_WIDTH / error) if error else trust
    return fitted


def _least_squares(rows: Sequence[Coefficients], weights: Sequence[float]) -> Coefficients:
    """Weighted least squares over coefficients ≥ 0.

    The best one is the unbounded best of some choice of coefficients that are not 0; with three of
    them every choice can be tried.
    """
    total = sum(weights)
    gram = [
        [sum(w * r[i] * r[j] for w, r in zip(weights, rows, strict=True)) / total for j in range(3)]
        for i in range(3)
    ]
    target = [sum(w * r[i] for w, r in zip(weights, rows, strict=True)) / total for i in range(3)]
    for i in range(3):
        gram[i][i] = gram[i][i] * (1 + RIDGE) or 1.0
    best, best_gain = (0.0, 0.0, 0.0), 0.0
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = _solve(
                [[gram[i][j] for j in chosen] for i in chosen], [target[i] for i in chosen]
            )
            if min(found) < 0:
                continue
            gain = sum(value * target[i] for value, i in zip(found, chosen, strict=True))
            if gain > best_gain:
                values = [0.0, 0.0, 0.0]
                for value, i in zip(found, chosen, strict=True):
                    values[i] = value
                best, best_gain = (values[0], values[1], values[2]), gain
    return best


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Solve a small positive definite system by elimination."""
    size = len(target)
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    for i in range(size):
        pivot = rows[i][i]
        for j in range(i + 1, size):
            factor = rows[j][i] / pivot
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    values = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * values[j] for j in range(i + 1, size))
        values[i] = (rows[i][size] - known) / rows[i][i]
    return values
