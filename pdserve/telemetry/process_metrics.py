"""What every exporter of Prometheus tells of its own process, under the names that all use."""

from collections.abc import Iterator

import psutil

from pdserve.telemetry.exposition import NO_LABELS, family


class ProcessMetrics:
    """This process. Read when it is scraped; costs nothing else."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def lines(self) -> Iterator[str]:
        with self._process.oneshot():
            times = self._process.cpu_times()
            rows = (
                (
                    "cpu_seconds_total",
                    "counter",
                    "User and system CPU time in seconds.",
                    times.user + times.system,
                ),
                (
                    "resident_memory_bytes",
                    "gauge",
                    "Resident memory in bytes.",
                    self._process.memory_info().rss,
                ),
                (
                    "start_time_seconds",
                    "gauge",
                    "Start of the process in seconds of Unix time.",
                    self._process.create_time(),
                ),
                ("open_fds", "gauge", "Open file descriptors.", self._process.num_fds()),
            )
        for name, kind, text, value in rows:
            yield from family(name, kind, text, [(NO_LABELS, value)], prefix="process_")
