"""The keys that this router lets in, from a file that may change while it runs.

A file that was changed is read again at the next call, so that a key can be taken away without a
restart. One that cannot be read any more leaves the keys as they were, and the log says so.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from pdserve.core.api_keys import ApiKey, find_key, parse_keys
from pdserve.core.clock import Clock
from pdserve.core.errors import ConfigError

LOOK_PERIOD_S = 1.0

logger = logging.getLogger(__name__)


class ApiKeys:
    """``fixed`` keys, and those of ``file``. Raises ConfigError where the file is no such file."""

    def __init__(self, fixed: Sequence[ApiKey], file: Path | None, clock: Clock) -> None:
        self._fixed = tuple(fixed)
        self._file = file
        self._clock = clock
        self._looked_s = clock.now_s()
        self._stamp = _stamp(file) if file is not None else None
        self._keys = (*self._fixed, *_read(file)) if file is not None else self._fixed

    def find(self, given: str) -> ApiKey | None:
        """The key that ``given`` is, if any."""
        self._look()
        return find_key(self._keys, given)

    def _look(self) -> None:
        now_s = self._clock.now_s()
        if self._file is None or now_s - self._looked_s < LOOK_PERIOD_S:
            return
        self._looked_s = now_s
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._keys = (*self._fixed, *_read(self._file))
        except ConfigError as error:
            logger.error("API keys stay as they were: %s", error)
        else:
            logger.info("API keys read again: %d", len(self._keys))


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(file: Path) -> tuple[ApiKey, ...]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    return parse_keys(text, f"security.api_keys_file: {file}")


def _unreadable(file: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else "it is no text"
    return ConfigError(f"security.api_keys_file: {file}: cannot be read: {reason}")
