"""The HTTP server's protocol, with bounds on what a client may send before anybody knows it.

    connection ── head, in header_timeout_s ──> body, in body_timeout_s ──> answer ──> next head
                    |                              |                          |
                    late: 408, too long: 431       late: 408                  body unread: LINGER_S
                    v                              v                          v
                   closed                         closed                     closed

By itself uvicorn holds a connection that never sends its head, or a byte of it at a time, as long
as the client likes (measured), takes in any number of requests that are sent ahead, and logs a line
for each call that it does not understand. Sizes of bodies are ``http_bodies.py``'s business. A
client that takes nothing of its answers is cut off here while they wait to be written, and by the
kernel (``server.py``) where all is written.
"""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from pdserve.core.config import LimitsConfig
from router.http_idle import IdleConnections

MAX_PIPELINED = 64  # requests that a connection may send ahead of their answers
LINGER_S = 2.0  # a client gets so long to read why it was refused, or to end its side
BAD_REQUEST, TIMED_OUT, HEAD_TOO_LARGE = 400, 408, 431
CONNECT, UPGRADE = b"CONNECT", b"upgrade"


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Made by uvicorn through ``functools.partial`` with the ``limits``, and with
    what all connections of a server share: which of them are ``idle``.
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401
        limits: LimitsConfig,
        idle: IdleConnections,
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._idle = idle
        self._in_head = True
        self._num_head_bytes = 0  # as they came, perhaps with some of the body
        self._head_size = 0  # as they were parsed
        self._refusal = (BAD_REQUEST, "this is no HTTP request")  # of what is garbled
        self._is_refused = False
        self._is_garbled = False  # what came behind requests that are still being answered
        self._num_unanswered = 0
        self._answered: RequestResponseCycle | None = None  # now; ``cycle`` is what came last
        self._wants_upgrade = False
        self._timer: asyncio.TimerHandle | None = None  # for the head, the body or the end
        self._stalling: asyncio.TimerHandle | None = None  # while the client must read first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections and not self._take_place():
            transport.abort()
            return
        self._watch_head()

    def _take_place(self) -> bool:
        """End another connection, one that waits between two requests, if there is one."""
        if (longest := self._idle.take()) is None:
            return False
        _close(longest, self.loop)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stalling()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it where the client reset it
        if self._answered is not None and not self._answered.response_complete:
            _disconnect(self._answered)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self._is_garbled or self.transport.is_closing():
            return
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._timer is None:
                self._watch_head()
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse_garbled()
        if self._in_head and self._num_head_bytes > self._limits.max_header_bytes:
            self._refusal = self._too_large()
            self._refuse_garbled()
        if self._in_head and self._timer is None:
            self._watch_what_came_behind()

    def _watch_what_came_behind(self) -> None:
        """Nothing is without a deadline: not a head behind another request, and not a connection
        where the rest of a body came that nobody had waited for.
        """
        if self._is_refused or self._is_garbled:
            return
        if self._num_head_bytes:
            self._watch_head()
        elif not self._num_unanswered:
            self._wait_for_next()

    def _wait_for_next(self) -> None:
        """As uvicorn does where a request is over with its answer."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self._idle.add(self.transport)

    def _parse(self, data: bytes) -> None:
        """The parser leaves out the body of who asks for another protocol, and all that follows:
        it gets the head again, without that wish. Java's own HTTP client asks so of every server.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._wants_upgrade:
                    self._refuse_garbled()
                    return
                (num_parsed,) = upgrade.args
                version = self.parser.get_http_version().encode()
                head = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
                head += [name + b": " + value for name, value in self.headers if name != UPGRADE]
                data = b"\r\n".join([*head, b"", b""]) + data[num_parsed:]
                self.parser = httptools.HttpRequestParser(self)
                self._wants_upgrade = False
            else:
                return

    # ---- what the parser finds --------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size = 0
        self._num_head_bytes = max(1, self._num_head_bytes)  # it may have come behind another one

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._grow_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == CONNECT:
            self._stop_parsing(BAD_REQUEST, "CONNECT: this is no proxy")
        self._wants_upgrade = self.parser.should_upgrade()
        if self._wants_upgrade:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            problem = f"more than {MAX_PIPELINED} requests were sent ahead of their answers"
            self._stop_parsing(BAD_REQUEST, problem)
        super().on_headers_complete()  # raises for a URL that is none: then it is no request yet
        self._in_head = False
        self._num_unanswered += 1
        self._watch(self._limits.body_timeout_s, self._on_late_body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade:
            return
        self._in_head, self._num_head_bytes = True, 0
        self._stop_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None and not self._num_head_bytes:
            self._idle.add(self.transport)
        self._num_unanswered -= 1
        unread = self.cycle.response_complete and self.cycle.more_body
        if unread and not self.transport.is_closing():
            self._watch(LINGER_S, self._hang_up)
        if self._is_garbled:
            self._refuse_garbled()

    def _unset_keepalive_if_required(self) -> None:
        super()._unset_keepalive_if_required()
        self._idle.discard(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stalling()

    # ---- bounds -----------------------------------------------------------------------------

    def _refuse_garbled(self) -> None:
        """What came last is wrong in its head or in its body."""
        if self._num_unanswered > (0 if self._in_head else 1):
            self._is_garbled = True  # those before it came whole: they are answered first
            self._stop_timer()
            return
        self._refuse(*self._refusal)

    def _grow_head(self, num_bytes: int) -> None:
        self._head_size += num_bytes
        too_many = len(self.headers) > self._limits.max_headers
        if too_many or self._head_size > self._limits.max_header_bytes:
            self._stop_parsing(*self._too_large())

    def _too_large(self) -> tuple[int, str]:
        limits = self._limits
        return HEAD_TOO_LARGE, (
            f"the head is larger than {limits.max_header_bytes} bytes, or has more than "
            f"{limits.max_headers} headers"
        )

    def _stop_parsing(self, status: int, message: str) -> NoReturn:
        """What comes here is refused. Called by the parser, which stops and says so."""
        self._refusal = (status, message)
        raise ValueError(message)

    def _watch_head(self) -> None:
        self._watch(self._limits.header_timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        if self._num_unanswered:
            self._watch_head()  # an earlier request is still being answered
        elif self._num_head_bytes:
            self._refuse(TIMED_OUT, f"the head took more than {self._limits.header_timeout_s:g} s")
        else:
            self._hang_up()

    def _on_late_body(self) -> None:
        if self.pipeline:  # it is not read on while an earlier request is being answered
            self._watch(self._limits.body_timeout_s, self._on_late_body)
        elif self.cycle.response_started:
            self._hang_up()
        else:
            self._refuse(TIMED_OUT, f"the body took more than {self._limits.body_timeout_s:g} s")

    def _watch_reader(self) -> None:
        """Cut off a client that takes nothing until then. While writing waits, nothing is added."""
        num_unsent = self.transport.get_write_buffer_size()
        stall_s = self._limits.client_stall_s
        self._stalling = self.loop.call_later(stall_s, self._on_stalled, num_unsent)

    def _on_stalled(self, num_unsent: int) -> None:
        if self.transport.get_write_buffer_size() < num_unsent:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_stalling(self) -> None:
        if self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None

    def _refuse(self, status: int, message: str) -> None:
        """Say why, in OpenAI's form, and hang up."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self._num_unanswered:  # whoever waits for its body waits no more
            _disconnect(self.cycle)
        if self.transport.can_write_eof():  # closed at once, what still comes would reset it all
            self.transport.write_eof()
            self.flow.resume_reading()
            self._watch(LINGER_S, self._hang_up)
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        _close(self.transport, self.loop)

    def _watch(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(timeout_s, on_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _close(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
    """Over TLS the client is to say goodbye too, which it does not before it looks: asyncio would
    wait half a minute for it.
    """
    transport.close()
    if is_ssl(transport):
        loop.call_later(LINGER_S, transport.abort)


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Whoever answers it is told that the client is gone."""
    cycle.disconnected = True
    cycle.message_event.set()
