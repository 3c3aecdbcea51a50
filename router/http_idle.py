"""HTTP connections that wait between two requests: which of them gives its place to a new one.

One whose client still takes its last answer does not: it would live on until it had it all, as one
more than there may be, or it would be cut off. A transport does not always tell: over TLS it writes
to another one at once. The kernel knows what the client's host has not confirmed, and whether the
next request has come while the event loop was busy.
"""

import asyncio
import fcntl
from collections import OrderedDict
from termios import FIONREAD, TIOCOUTQ

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
            if _can_go(transport):
                return transport
            self._waiting[transport] = None
        return None


def _can_go(transport: asyncio.Transport) -> bool:
    """Whether its client has all that was said to it and has said nothing since, in the kernel's
    queues too.
    """
    if transport.get_write_buffer_size():
        return False
    own_end = transport.get_extra_info("socket")
    try:
        queues = [fcntl.ioctl(own_end, queue, bytes(4)) for queue in (TIOCOUTQ, FIONREAD)]
    except (OSError, ValueError):
        return True  # the socket is closed already
    return not any(map(any, queues))
