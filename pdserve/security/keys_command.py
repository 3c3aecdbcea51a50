"""``pdserve keys add``: a new API key, shown once, and the line by which a router knows it."""

import argparse
import sys
from pathlib import Path

from pdserve.core.api_keys import hashed, line_of, new_key, parse_keys
from pdserve.core.errors import ConfigError
from pdserve.security.secret_file import append_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="whose key it is; a tenant may have several")
    parser.add_argument(
        "--file", type=Path, help="append to this file, which security.api_keys_file names"
    )
    parser.add_argument(
        "--operator", action="store_true", help="it may read /metrics and /admin/status too"
    )
    parser.add_argument(
        "--stdin", action="store_true", help="hash the key that comes on stdin, make none"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for a name that is none, a short key, or a file that is no such file."""
    key = sys.stdin.readline().strip() if arguments.stdin else new_key()
    kept = hashed(key, tenant=arguments.name, is_operator=arguments.operator)
    if arguments.file is not None:
        _check(arguments.file)
        append_line(arguments.file, line_of(kept))
        sys.stderr.write(f"appended to {arguments.file}\n")
    else:
        sys.stderr.write(f"{line_of(kept)}\n")
    if not arguments.stdin:
        sys.stderr.write("the key, which is shown this once:\n")
        sys.stdout.write(f"{key}\n")
    return 0


def _check(file: Path) -> None:
    """That the file, if it is there, is one of keys."""
    try:
        if file.exists():
            parse_keys(file.read_text(encoding="utf-8"), str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--file: {file}: cannot be read: {error}") from error
