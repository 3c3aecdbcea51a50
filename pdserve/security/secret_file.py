"""Writing a file that only its owner may read."""

import os
from pathlib import Path

from pdserve.core.errors import ConfigError

OWNER_ONLY, READABLE = 0o600, 0o644


def write_new(path: Path, content: bytes, *, is_secret: bool) -> None:
    """Raises ConfigError where the file is there already, or cannot be written."""
    try:
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY if is_secret else READABLE
        )
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already: remove it first") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def append_line(path: Path, line: str) -> None:
    """Make the file for its owner alone where it is not there. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
        with os.fdopen(fd, "rb+") as file:
            kept = file.read()
            ends = b"" if not kept or kept.endswith(b"\n") else b"\n"
            file.write(ends + line.encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
