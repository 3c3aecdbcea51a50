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
from contextlib import ExitStack
from pathlib import Path

from kv_transfer.messages import Message
from kv_transfer.transports.codec import decode, encode
from kv_transfer.transports.transport import Arrived, Closed, LinkSetting, Stream, StreamEvent
from pdserve.core.errors import LinkDownError

MAX_MESSAGE_BYTES = 1 << 15  # a window of them fits into what a socket takes at once
CONNECTION = socket.SOCK_SEQPACKET  # a message is read as it was written


class Listening:
    """A name where one other process of the same user can connect.

    Raises LinkDownError if the system makes none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with ExitStack() as undo:
                self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, CONNECTION))
                self._socket.bind(path)
                undo.callback(self.close)
                os.chmod(path, 0o600)  # before anybody can connect
                self._socket.listen(1)
                self._socket.setblocking(False)
                undo.pop_all()
        except OSError as error:
            raise LinkDownError(f"there is no line at {path}: {error}") from error

    def accept(self, stream: Stream, setting: LinkSetting) -> "Line":
        """The other side, which has connected. Raises LinkDownError if it has not."""
        try:
            with ExitStack() as undo:
                connection = undo.enter_context(self._socket.accept()[0])
                self.close()
                line = Line(connection, stream, setting)
                undo.pop_all()
            return line
        except OSError as error:
            raise LinkDownError(f"the receiver did not come to the line: {error}") from error

    def close(self) -> None:
        self._socket.close()
        Path(self.path).unlink(missing_ok=True)


def connect(path: str, stream: Stream, setting: LinkSetting) -> "Line":
    """Raises LinkDownError if nobody listens there for this process."""
    try:
        with ExitStack() as undo:
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, CONNECTION))
            connection.connect(path)
            line = Line(connection, stream, setting)
            undo.pop_all()
        return line
    except OSError as error:
        raise LinkDownError(
            f"the sender's line can not be reached: {error}; both processes must share /dev/shm"
        ) from error


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
