"""Asking the router of a running cluster, found through its run file.

Needs neither Ray nor the model; answers within a second or says why it cannot.
"""

import argparse
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.cluster.own_certificate import pinned_context
from pdserve.cluster.run_file import RunRecord, run_folder, running
from pdserve.core.environment import api_key
from pdserve.core.errors import ConfigError, NoNodeError

TIMEOUT_S = 5.0
ORDER_TIMEOUT_S = 15.0
CLIENT_ERRORS = range(400, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A router, and the token that it takes orders with, if it is known."""

    url: str
    token: str | None
    context: ssl.SSLContext | None = None  # of HTTPS; None: public CAs are trusted


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="of several clusters that run here, the one to ask")
    parser.add_argument("--url", help="ask the router at this address, e.g. http://host:8000")
    parser.add_argument("--json", action="store_true", help="for programs")


def add_token_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token",
        help="with --url: admin_token of the run file on the host of `pdserve serve`; for `status` "
        "an operator's API key will do; default: $PDSERVE_API_KEY",
    )
    parser.add_argument("--ca", help="with an https --url: PEM file of the CA to trust")


def target(arguments: argparse.Namespace) -> Target:
    """Raises NoNodeError where no cluster runs, ConfigError where many could be meant, or none."""
    if arguments.url is not None:
        given = vars(arguments)
        return Target(
            url=_checked(arguments.url),
            token=given.get("token") or api_key(),
            context=trusting(given.get("ca")),
        )
    record = _chosen(running(run_folder()), arguments.name)
    if record.http_url is None:
        raise NoNodeError(f"cluster {record.name!r} is still starting; its logs: {record.log_dir}")
    context = None if record.certificate is None else pinned_context(record.certificate)
    return Target(url=record.http_url, token=record.admin_token, context=context)


def trusting(ca: str | None) -> ssl.SSLContext | None:
    """Who trusts this CA; None: whom ssl trusts. Raises ConfigError where it cannot be used."""
    try:
        return None if ca is None else ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--ca: {ca}: cannot be used: {error}") from error


def _checked(given: str) -> str:
    url = ("" if "://" in given else "http://") + given.rstrip("/")
    try:
        host = urllib.parse.urlsplit(url).hostname
    except ValueError as error:
        raise ConfigError(f"--url: got {given!r}: {error}") from error
    if not host:
        raise ConfigError(f"--url: got {given!r}, expected one like http://host:8000")
    return url


def get_status(at: Target) -> dict[str, Any]:
    """The router's own words. Raises NoNodeError."""
    request = urllib.request.Request(f"{at.url}/admin/status", headers=_headers(at))
    status = _call(at, request, TIMEOUT_S)
    if "nodes" not in status:
        raise NoNodeError(f"{at.url} is no pdserve router")
    return status


def give_order(at: Target, path: str, order: Mapping[str, object]) -> dict[str, Any]:
    """What has begun. Raises ConfigError for an order that is refused, else NoNodeError."""
    headers = {"Content-Type": "application/json", **_headers(at)}
    body = json.dumps(order).encode()
    return _call(at, urllib.request.Request(at.url + path, body, headers), ORDER_TIMEOUT_S)


def _headers(at: Target) -> dict[str, str]:
    return {} if at.token is None else {"Authorization": f"Bearer {at.token}"}


def _call(at: Target, request: urllib.request.Request, timeout_s: float) -> dict[str, Any]:
    # No proxy: a router's admin service is for its own network.
    secured = urllib.request.HTTPSHandler(context=at.context)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), secured)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return _object(at, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            message = _error_message(error.read())
        kind = ConfigError if error.code in CLIENT_ERRORS and message else NoNodeError
        raise kind(message or f"{at.url} is no pdserve router: HTTP {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        hint = tls_hint(at.url, reason)
        raise NoNodeError(f"no router answers at {at.url}: {reason}{hint}") from error


def tls_hint(url: str, reason: object) -> str:
    """What may help where one side of a call speaks TLS otherwise than the other expects."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; give its CA by --ca, a PEM file"
    if isinstance(reason, ssl.SSLError):
        return "; if it speaks no TLS, the address begins with http://"
    spoke_oddly = isinstance(reason, (http.client.BadStatusLine, ConnectionResetError))
    if spoke_oddly and url.startswith("http://"):
        return "; if it speaks TLS, the address begins with https://"
    return ""


def _object(at: Target, raw: bytes) -> dict[str, Any]:
    answer = json.loads(raw)
    if not isinstance(answer, dict):
        raise NoNodeError(f"{at.url} is no pdserve router")
    return answer


def _error_message(raw: bytes) -> str | None:
    """What one of our error objects says."""
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return None


def _chosen(records: list[RunRecord], name: str | None) -> RunRecord:
    """The cluster to ask."""
    named = [record for record in records if name in (None, record.name)]
    shown = "\n".join(f"  {record.name}  {record.http_url or 'starting'}" for record in records)
    if not records:
        raise NoNodeError("no cluster runs on this machine")
    if not named:
        raise ConfigError(f"--name: no cluster named {name!r} runs here; there are\n{shown}")
    if len(named) > 1:
        raise ConfigError(f"several clusters run here; choose one by --name:\n{shown}")
    return named[0]
