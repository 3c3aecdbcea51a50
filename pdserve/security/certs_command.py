"""``pdserve certs``: certificates for development, ready to be named in the cluster file."""

import argparse
import datetime
import sys
from pathlib import Path

from pdserve.core.errors import ConfigError
from pdserve.security.certificates import development_files
from pdserve.security.secret_file import write_new

DEFAULT_DAYS = 365
MAX_DAYS = 3650


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="where to put the files; made if it is not there")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or an address by which clients call the router, besides localhost; may be "
        "repeated",
    )
    parser.add_argument(
        "--days", type=int, default=DEFAULT_DAYS, help="how long they hold (default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError where a file is there already, or a name is none."""
    if not 1 <= arguments.days <= MAX_DAYS:
        raise ConfigError(f"--days: got {arguments.days}, allowed are 1 to {MAX_DAYS}")
    folder = arguments.folder.expanduser().absolute()
    now = datetime.datetime.now(datetime.UTC)
    try:
        files = development_files(arguments.host, days=arguments.days, now=now)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except ValueError as error:
        raise ConfigError(f"--host: {error}") from error
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from error
    for file in files:
        write_new(folder / file.name, file.content, is_secret=file.is_secret)
    sys.stdout.write(_advice(folder))
    return 0


def _advice(folder: Path) -> str:
    return f"""\
# For development. In the cluster file:
security:
  tls_certificate: {folder / "router.pem"}
  tls_key: {folder / "router-key.pem"}
  cluster_ca: {folder / "cluster-ca.pem"}
  cluster_certificate: {folder / "cluster.pem"}
  cluster_key: {folder / "cluster-key.pem"}
# Clients trust {folder / "public-ca.pem"}.
# The three cluster files belong to the same place on each host.
"""
