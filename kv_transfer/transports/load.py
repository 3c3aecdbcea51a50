"""Finds a transport by name."""

from importlib import import_module
from typing import Protocol, cast

from kv_transfer.transports import TRANSPORTS
from kv_transfer.transports.transport import Link, LinkSetting, Stream
from pdserve.core.errors import ConfigError


class LinkFactory(Protocol):
    """Makes a link over a stream."""

    def __call__(self, stream: Stream, setting: LinkSetting) -> Link: ...


def load_link(transport: str) -> LinkFactory:
    """Raises ConfigError, with the known names, if there is no such transport."""
    if (place := TRANSPORTS.get(transport)) is None:
        known = ", ".join(sorted(TRANSPORTS))
        raise ConfigError(f"kv_transfer.transport: {transport!r} is not one of {known}")
    module, _, name = place.partition(":")
    return cast("LinkFactory", getattr(import_module(module), name))
