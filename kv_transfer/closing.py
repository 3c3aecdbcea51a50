"""Closes links so that one which can not be closed keeps neither the others open nor its peer."""

import logging
from collections.abc import Iterable
from contextlib import ExitStack

from kv_transfer.transports.transport import Link
from pdserve.core.errors import TransferError

logger = logging.getLogger(__name__)


def close_links(links: Iterable[Link], peer_id: str) -> None:
    """Close each. Who calls has taken them out of its books: what can not be closed is gone too."""
    with ExitStack() as closing:  # also where one raises what nobody expects
        for link in links:
            closing.callback(_close, link, peer_id)


def _close(link: Link, peer_id: str) -> None:
    try:
        link.close()
    except (TransferError, RuntimeError, OSError) as error:  # as CUDA, torch, the system fail
        logger.warning("a KV link with %s was not closed in order: %r", peer_id, error)
