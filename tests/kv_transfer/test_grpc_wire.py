"""The gRPC wire itself: ports, bytes that are no message, streams that end, threads that end."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.messages import Delivered, Heartbeat, Message
from kv_transfer.transports.grpc_wire import SERVICE, GrpcWire
from kv_transfer.transports.transport import Arrived, Closed, Opened, StreamEvents
from pdserve.core.errors import ConfigError
from tests.fuzzing import inputs


@pytest.fixture
def ends() -> Iterator[tuple[GrpcWire, StreamEvents, GrpcWire, StreamEvents]]:
    events: tuple[StreamEvents, StreamEvents] = SimpleQueue(), SimpleQueue()
    wires = [GrpcWire(queue, host="127.0.0.1") for queue in events]
    yield wires[0], events[0], wires[1], events[1]
    for wire in wires:
        wire.close()


def free_ports(count: int) -> tuple[int, int]:
    """A range of neighbouring ports that were free a moment ago."""
    for low in range(20000 + os.getpid() % 9000, 60000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", low + number))
        except OSError:
            continue
        else:
            return low, low + count - 1
        finally:
            for probe in sockets:
                probe.close()
    raise AssertionError("no free ports")


def test_ranks_of_one_host_share_a_port_range_and_its_end_is_named() -> None:
    low, high = free_ports(2)
    wires = [GrpcWire(SimpleQueue(), host="127.0.0.1", port_range=(low, high)) for _ in range(2)]
    assert [wire.address for wire in wires] == [f"127.0.0.1:{low}", f"127.0.0.1:{high}"]
    with pytest.raises(ConfigError, match=f"can not bind a port of {low} to {high} on 127.0.0.1"):
        GrpcWire(SimpleQueue(), host="127.0.0.1", port_range=(low, high))
    for wire in wires:
        wire.close()


def test_messages_keep_their_order_both_ways(
    ends: tuple[GrpcWire, StreamEvents, GrpcWire, StreamEvents],
) -> None:
    first, first_events, second, second_events = ends
    stream = first.connect(second.address)
    for seq in range(50):
        stream.send(Message(Delivered(seq)))
    opened = second_events.get(timeout=10)
    assert isinstance(opened, Opened)
    for seq in range(50):
        arrived = second_events.get(timeout=10)
        assert isinstance(arrived, Arrived)
        assert arrived.message.body == Delivered(seq)
        opened.stream.send(Message(Delivered(seq)))
    for seq in range(50):
        answer = first_events.get(timeout=10)
        assert isinstance(answer, Arrived)
        assert answer.message.body == Delivered(seq)


@pytest.mark.parametrize("closer", ["dialled", "accepted"])
def test_closing_one_end_ends_the_other_and_all_threads(
    ends: tuple[GrpcWire, StreamEvents, GrpcWire, StreamEvents], closer: str
) -> None:
    first, first_events, second, second_events = ends
    stream = first.connect(second.address)
    stream.send(Message(Heartbeat()))
    opened = second_events.get(timeout=10)
    assert isinstance(opened, Opened)
    assert isinstance(second_events.get(timeout=10), Arrived)
    (stream if closer == "dialled" else opened.stream).close()
    assert isinstance(first_events.get(timeout=10), Closed)
    assert isinstance(second_events.get(timeout=10), Closed)
    for thread in threading.enumerate():
        if thread.name == "kv-read":
            thread.join(5)
            assert not thread.is_alive()
    stream.send(Message(Heartbeat()))  # into the void, without harm


def test_nobody_at_the_address_closes_the_stream_by_name(
    ends: tuple[GrpcWire, StreamEvents, GrpcWire, StreamEvents],
) -> None:
    wire, events, _, _ = ends
    wire.connect("127.0.0.1:1")
    closed = events.get(timeout=10)
    assert isinstance(closed, Closed)
    assert "connection lost: UNAVAILABLE" in str(closed.error)


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    events: StreamEvents = SimpleQueue()
    first, second = GrpcWire(SimpleQueue(), host="127.0.0.1"), GrpcWire(events, host="127.0.0.1")
    first.connect(second.address)
    assert isinstance(events.get(timeout=10), Opened)
    first.close()
    second.close()


@given(raw=st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=5))
@inputs(15)
@pytest.mark.fuzz
def test_bytes_that_are_no_message_end_their_stream_alone(raw: list[bytes]) -> None:
    events: StreamEvents = SimpleQueue()
    wire = GrpcWire(events, host="127.0.0.1")
    with grpc.insecure_channel(wire.address) as channel:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/Link"
        )
        answers = call(iter([*raw, b"\xff\xff"]))
        with suppress(grpc.RpcError):  # cancelled, or ended
            assert next(answers, None) is None
    while not isinstance(event := events.get(timeout=10), Closed):
        pass
    assert "malformed message" in str(event.error)
    wire.connect(wire.address)
    assert isinstance(events.get(timeout=10), Opened)
    wire.close()


def test_closing_while_others_connect_leaves_no_reader() -> None:
    for _ in range(20):
        events: StreamEvents = SimpleQueue()
        wire = GrpcWire(events, host="127.0.0.1")
        with grpc.insecure_channel(wire.address) as channel:
            call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
                f"/{SERVICE}/Link"
            )
            answers = [call(iter(())) for _ in range(4)]
            assert isinstance(events.get(timeout=10), Opened)
            wire.close()
            for answer in answers:
                answer.cancel()
