"""Where a process of the cluster writes: one file for each, whatever incarnation it is of.

Log lines go there, and so does what libraries print; terminals show only the command's own lines.
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from pdserve.core.environment import cache_dir
from pdserve.telemetry.json_log import JsonFormatter

PREVIOUS = ".previous"  # one generation
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_dir(folder: str) -> Path:
    """The directory of a cluster's logs on this host."""
    return cache_dir() / "logs" / folder


def set_aside(directory: Path) -> None:
    """Make place for a new run's logs: those of the run before become ``NAME.previous``, and what
    was there goes.
    """
    if not directory.is_dir():
        return
    previous = directory.with_name(f"{directory.name}{PREVIOUS}")
    shutil.rmtree(previous, ignore_errors=True)
    directory.rename(previous)


@contextmanager
def prints_to_file(folder: str, process: str) -> Iterator[None]:
    """What libraries print in this process goes to ``process``.log, inside the block.

    Ray prints about each dead worker from a thread of its own, in the middle of our lines. A
    ``Console`` made before keeps the terminal.
    """
    directory = log_dir(folder)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{process}.log"
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file):
        yield


def log_to_file(folder: str, process: str, log_format: str) -> None:
    """Send this process's log, stdout and stderr to ``process``.log, from now on.

    ``log_format`` is that of ``observability``; what libraries print stays as it is.
    """
    directory = log_dir(folder)
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / f"{process}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonFormatter(process) if is_json else logging.Formatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
