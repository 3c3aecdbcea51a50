"""A rank's end of its out-ring: whichever of its threads has something to say, says it here."""

import logging
import threading
from contextlib import suppress

from kv_transfer.commands import KvEvent
from pdserve.core.errors import InternalError, PdserveError, RankError
from pdserve.engine.batch import StepOutput
from pdserve.rank.messages import Pulse, RankFailed, RankReady
from pdserve.rank.ring import RingWriter
from pdserve.rank.wire import encode

logger = logging.getLogger(__name__)

MAX_MESSAGE = 4000  # characters; some libraries put a page of C++ frames into an error


class Reports:
    """Owns the writer. ``timeout_s`` is how long the front may take to make space."""

    def __init__(self, writer: RingWriter, rank: int, *, timeout_s: float) -> None:
        self._writer = writer
        self._rank = rank
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # a ring has one writer at a time
        self._failed = False

    def send(self, message: StepOutput | KvEvent | RankReady | Pulse | RankFailed) -> None:
        """Raises RingClosedError if the front is gone, RankError if it makes no space."""
        record = encode(message)
        with self._lock:
            self._writer.write(record, timeout_s=self._timeout_s)

    def fail(self, error: Exception) -> None:
        """Log why the rank can not go on and tell the front, the first time; the rest follows."""
        if self._failed:
            return
        self._failed = True
        logger.error("rank %d failed", self._rank, exc_info=error)
        kind = error.kind if isinstance(error, PdserveError) else InternalError().kind
        message = str(error) if isinstance(error, PdserveError) else repr(error)
        with suppress(RankError):  # the front may be gone: then nobody needs to be told
            self.send(RankFailed(rank=self._rank, kind=kind, message=message[:MAX_MESSAGE]))

    def close(self) -> None:
        with self._lock:
            self._writer.close()
