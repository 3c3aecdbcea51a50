"""A wire over gRPC: one bidirectional call per stream, each on a channel of its own.

    endpoint's thread                 threads of a stream
      send ── encode ──> queue ──> gRPC's writer of the call (dialled) | kv-write (accepted)
      events <── Arrived, Closed ────────── decode <── kv-read

Owns server, channels and threads of one endpoint. Who dials proves first that it has the cluster's
secret, where there is one. Messages are bytes for gRPC; reading and writing wait outside the GIL.
Deadlines and heartbeats are the endpoint's business: gRPC's own keepalive earns a GOAWAY when it is
frequent enough to be of use.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import cast

import grpc

from kv_transfer.messages import Message
from kv_transfer.transports.codec import decode, encode
from kv_transfer.transports.transport import Arrived, Closed, Opened, Stream, StreamEvents
from pdserve.core.cluster_access import ClusterAccess
from pdserve.core.errors import ConfigError, LinkDownError
from pdserve.rpc.gate_client import prove
from pdserve.rpc.gate_server import ThreadedGate
from pdserve.rpc.tls import channel_credentials, member_options, server_credentials
from pdserve.rpc.v1 import gate_pb2_grpc
from pdserve.rpc.v1.kv_transfer_pb2 import DESCRIPTOR

SERVICE = DESCRIPTOR.services_by_name["KvTransfer"].full_name
METHOD = f"/{SERVICE}/Link"
MAX_STREAMS = 256  # each accepted stream holds a thread while it lives
STOP_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 80 << 20  # more than the largest frame through hosts
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address share one connection
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # else two ranks could be given the same port
    ("grpc.enable_http_proxy", 0),  # KV goes to the address that it is meant for
)


class GrpcStream:
    """One end of a call. ``cancel`` ends the call at once, whatever it is doing."""

    def __init__(self, *, is_dialled: bool) -> None:
        self.is_dialled = is_dialled
        self.cancel: Callable[[], object] | None = None
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()

    def send(self, message: Message) -> None:
        self._outgoing.put(encode(message))

    def close(self) -> None:
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            self._outgoing.put(None)
            cancel()

    def outgoing(self) -> Iterator[bytes]:
        """What gRPC is to write, until the stream is closed."""
        return iter(cast("Callable[[], bytes]", self._outgoing.get), None)


class GrpcWire:
    """``host`` is bound and told to others; ``port_range`` is inclusive, None lets the system pick.

    ``access``: None lets in whoever reaches the port. Raises ConfigError if no port of the range
    can be bound.
    """

    def __init__(
        self,
        events: StreamEvents,
        *,
        host: str,
        port_range: tuple[int, int] | None = None,
        access: ClusterAccess | None = None,
    ) -> None:
        self._events = events
        self._access = access
        self._lock = Lock()
        self._streams: dict[GrpcStream, Thread] = {}  # with their readers
        self._writers = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="kv-write")
        self._server = grpc.server(
            self._writers, options=OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS
        )
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._accept
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Link": handler}),)
        )
        self._gate: ThreadedGate | None = None
        if access is not None:
            self._gate = ThreadedGate(access.secret)
            gate_pb2_grpc.add_GateServicer_to_server(self._gate, self._server)
        self.host = host
        self.address = f"{host}:{self._bind(host, port_range)}"
        self._server.start()

    def connect(self, address: str) -> Stream:
        channel = self._open_channel(address)
        stream = GrpcStream(is_dialled=True)
        stream.cancel = channel.close  # and with it the call
        self._start_reading(stream, partial(self._dial, channel, stream))
        return stream

    def close(self) -> None:
        for stream in self._reading():
            stream.close()
        self._server.stop(None).wait(STOP_TIMEOUT_S)
        for reader in self._reading().values():  # also of streams that were accepted meanwhile
            reader.join(STOP_TIMEOUT_S)
        self._writers.shutdown()

    def _open_channel(self, address: str) -> grpc.Channel:
        if self._access is None or self._access.tls is None:
            return grpc.insecure_channel(address, options=OPTIONS)
        credentials = channel_credentials(self._access.tls)
        return grpc.secure_channel(address, credentials, (*OPTIONS, *member_options()))

    def _dial(self, channel: grpc.Channel, stream: GrpcStream) -> Iterator[bytes]:
        """Waits for the challenge. Raises grpc.RpcError, or LinkDownError."""
        try:
            link: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
            metadata = None if self._access is None else prove(channel, self._access.secret, METHOD)
            return link(stream.outgoing(), metadata=metadata)
        except ValueError as error:  # gRPC's, of a channel that is closed
            raise LinkDownError("connection lost: it was closed before it was made") from error

    def _reading(self) -> dict[GrpcStream, Thread]:
        with self._lock:
            return dict(self._streams)

    def _bind(self, host: str, port_range: tuple[int, int] | None) -> int:
        low, high = port_range or (0, 0)
        for port in range(low, high + 1):
            try:
                return self._listen(f"{host}:{port}")
            except RuntimeError:  # taken
                continue
        where = "a free port" if port_range is None else f"a port of {low} to {high}"
        raise ConfigError(f"network: KV transfer can not bind {where} on {host}")

    def _listen(self, address: str) -> int:
        if self._access is None or self._access.tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, server_credentials(self._access.tls))

    def _accept(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if self._gate is not None:
            self._gate.check(METHOD, context)
        stream = GrpcStream(is_dialled=False)
        stream.cancel = context.cancel
        self._events.put(Opened(stream))
        self._start_reading(stream, lambda: incoming)
        return stream.outgoing()

    def _start_reading(self, stream: GrpcStream, begin: Callable[[], Iterator[bytes]]) -> None:
        reader = Thread(target=self._read, args=(stream, begin), name="kv-read", daemon=True)
        with self._lock:  # who sees the reader may join it
            self._streams[stream] = reader
            reader.start()

    def _read(self, stream: GrpcStream, begin: Callable[[], Iterator[bytes]]) -> None:
        error = LinkDownError("the other side ended the stream")
        try:
            for raw in begin():
                self._events.put(Arrived(stream, decode(raw)))
        except grpc.RpcError as lost:
            error = LinkDownError(_describe(lost))
        except LinkDownError as malformed:
            error = malformed
        stream.close()
        with self._lock:
            del self._streams[stream]
        self._events.put(Closed(stream, error))


def _describe(error: object) -> str:
    if isinstance(error, grpc.Call):  # on the dialled side; the other one is told nothing
        return f"connection lost: {error.code().name}: {error.details()}"
    return f"connection lost{f': {error}' if str(error) else ''}"
