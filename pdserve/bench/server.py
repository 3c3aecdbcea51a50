"""Which server a bench measures: one that is named, else the cluster that runs on this machine."""

import argparse
import ssl
import sys
from dataclasses import dataclass

import httpx

from pdserve.cluster.admin import target, trusting
from pdserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Its address, and whom HTTPS trusts there."""

    url: str
    verify: ssl.SSLContext


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """For benches that start no server of their own."""
    parser.add_argument(
        "--base-url", help="of any OpenAI-compatible server; default: the cluster that runs here"
    )
    parser.add_argument("--name", help="of several clusters that run here, the one to measure")
    add_ca_argument(parser)


def add_ca_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ca", help="with an https --base-url: PEM file of the CA to trust; default: the system's"
    )


def server_of(args: argparse.Namespace) -> Server:
    """The one to measure; says on stderr which, where it was not named.

    Raises ConfigError for what is no address or CA and where several clusters run, NoNodeError
    where none does.
    """
    if args.base_url is not None:
        return named_server(args.base_url, args.ca)
    found = target(argparse.Namespace(url=None, name=args.name))
    sys.stderr.write(f"measuring the cluster at {found.url}\n")
    return Server(url=found.url, verify=found.context or ssl.create_default_context())


def named_server(base_url: str, ca: str | None) -> Server:
    """Raises ConfigError. ``$SSL_CERT_FILE`` counts where no CA is given."""
    url = base_url if "://" in base_url else f"http://{base_url}"
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--base-url: got {base_url!r}: {error}") from error
    return Server(url=url.rstrip("/"), verify=trusting(ca) or ssl.create_default_context())
