"""Messages between two processes of one host, over a socket that has a name in the file system.

    sender                                        receiver
      listens at a path, and tells it ─────────>    connects
      accepts, once the receiver has said so        both: a Line

A message takes a tenth of what it takes over gRPC: who sends writes into the socket itself, and the
endpoint's thread of the other side waits for that. The stream beside it says when the other process
is gone, and so does the line.
"""

import os
import socket
from pathlib import Path

from kv_transfer.messages import Message
from kv_transfer.transports.codec import decode, encode
from kv_transfer.transports.transport import Arrived, Closed, LinkSetting, Stream, StreamEvent
from pdserve.core.errors import LinkDownError

MAX_MESSAGE_BYTES = 1 << 15  # a window of them fits into what a socket takes at once
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
    """One end of a connection, the endpoint's thread's. What comes is an event of ``stream``."""

    def __init__(self, connection: socket.socket, stream: Stream, setting: LinkSetting) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._stream = stream
        self._setting = setting
        self._is_open = True
        setting.sources.watch(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[StreamEvent]:
        """The next message, or the end."""
        try:
            if raw := self._socket.recv(MAX_MESSAGE_BYTES):
                return [Arrived(self._stream, decode(raw))]
            error = LinkDownError("connection lost: the other process closed the line")
        except BlockingIOError:
            return []
        except OSError as lost:
            error = LinkDownError(f"connection lost: {lost}")
        except LinkDownError as malformed:
            error = malformed
        self.close()
        return [Closed(self._stream, error)]

    def send(self, message: Message) -> None:
        """Never waits: an end that lets its messages pile up is lost."""
        try:
            self._socket.send(encode(message), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._lose(LinkDownError("the other process does not read its messages"))
        except OSError as error:
            self._lose(LinkDownError(f"connection lost: {error}"))

    def close(self) -> None:
        """May be called again."""
        if self._is_open:
            self._is_open = False
            self._setting.sources.forget(self)
            self._socket.close()

    def _lose(self, error: LinkDownError) -> None:
        self._setting.events.put(Closed(self._stream, error))
