"""Messages between two processes of one host, over a socket that has a name in the file system.

    sender                                        receiver
      listens at a path, and tells it ─────────>    connects
      accepts, once the receiver has said so        both: a Line

A message takes a tenth of what it takes over gRPC: who sends writes into the socket itself, and one
thread of the other side waits for it. The stream beside it says when the other process is gone, and
so does the line.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path
from threading import Thread

from kv_transfer.messages import Message
from kv_transfer.transports.codec import decode, encode
from kv_transfer.transports.transport import Arrived, Closed, LinkSetting, Stream
from pdserve.core.errors import LinkDownError

MAX_MESSAGE_BYTES = 1 << 18  # more than a socket takes at once
CONNECTION = socket.SOCK_SEQPACKET  # a message is read as it was written


class Listening:
    """A name where one other process of the same user can connect."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, CONNECTION)
        self._socket.bind(path)
        os.chmod(path, 0o600)  # before anybody can connect
        self._socket.listen(1)
        self._socket.setblocking(False)

    def accept(self, stream: Stream, setting: LinkSetting) -> "Line":
        """The other side, which has connected. Raises LinkDownError if it has not."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            raise LinkDownError(f"the receiver did not come to the line: {error}") from error
        connection.setblocking(True)
        self.close()
        return Line(connection, stream, setting)

    def close(self) -> None:
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)


def connect(path: str, stream: Stream, setting: LinkSetting) -> "Line":
    """Raises LinkDownError if nobody listens there for this process."""
    connection = socket.socket(socket.AF_UNIX, CONNECTION)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise LinkDownError(
            f"the sender's line can not be reached: {error}; both processes must share /dev/shm"
        ) from error
    return Line(connection, stream, setting)


class Line:
    """One end of a connection. What comes goes into the endpoint's queue, as if by ``stream``."""

    def __init__(self, connection: socket.socket, stream: Stream, setting: LinkSetting) -> None:
        self._socket = connection
        self._stream = stream
        self._setting = setting
        self._thread = Thread(target=self._read, name="kv-line", daemon=True)
        setting.threads.add(self._thread)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Never waits: an end that lets its messages pile up is lost."""
        try:
            self._socket.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._end(LinkDownError("the other process does not read its messages"))
        except OSError as error:  # gone; the reader may know why
            self._end(LinkDownError(f"connection lost: {error}"))

    def close(self) -> None:
        """Ends the reader too. May be called again."""
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        error = LinkDownError("connection lost: the other process closed the line")
        try:
            while raw := self._socket.recv(MAX_MESSAGE_BYTES):
                self._setting.events.put(Arrived(self._stream, decode(raw)))
        except LinkDownError as malformed:
            error = malformed
        except OSError as lost:
            error = LinkDownError(f"connection lost: {lost}")
        self._end(error)
        self._socket.close()
        self._setting.threads.discard(self._thread)

    def _end(self, error: LinkDownError) -> None:
        self._setting.events.put(Closed(self._stream, error))
