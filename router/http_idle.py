"""HTTP connections that wait between two requests: which of them gives its place to a new one.

One whose client still takes its last answer does not: it would live on until it had it all, as one
more than there may be, or it would be cut off. A transport does not always tell: over TLS it writes
to another one at once. The kernel knows what the client's host has not confirmed.
"""

import asyncio
import fcntl
import termios
from collections import OrderedDict

MAX_LOOKS = 16  # at others, for a new connection's sake


class IdleConnections:
    """Those of one server, in the order in which they began to wait."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[asyncio.Transport, None] = OrderedDict()

    def add(self, transport: asyncio.Transport) -> None:
        """It waits from now on."""
        self._waiting[transport] = None

    def discard(self, transport: asyncio.Transport) -> None:
        """It waits no more, if it did."""
        self._waiting.pop(transport, None)

    def take(self) -> asyncio.Transport | None:
        """The one that has waited longest and can go; None if that is none of the first few.

        Those that cannot are asked again after all others.
        """
        for _ in range(min(MAX_LOOKS, len(self._waiting))):
            transport, _none = self._waiting.popitem(last=False)
            if _has_said_all(transport):
                return transport
            self._waiting[transport] = None
        return None


def _has_said_all(transport: asyncio.Transport) -> bool:
    if transport.get_write_buffer_size():
        return False
    try:
        unconfirmed = fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return True  # the socket is closed already
    return not any(unconfirmed)
