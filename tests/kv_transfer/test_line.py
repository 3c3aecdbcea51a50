"""Messages past the stream, between processes of one host: the tests that every transport passes,
and what becomes of a line whose other end is gone, stopped, or no friend.
"""

import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from kv_transfer.frames import LENT
from kv_transfer.messages import Frame, Heartbeat, Message
from kv_transfer.payload import Lent
from kv_transfer.sender import MAX_LENT_CELLS
from kv_transfer.transports.line import Line, Listening, connect
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.transport import (
    Arrived,
    Closed,
    LinkSetting,
    Stream,
    StreamEvents,
)
from kv_transfer.transports.turns import Turns
from pdserve.core.errors import LinkDownError
from pdserve.core.kv_layout import BlockId
from tests.fakes import FakeClock
from tests.kv_transfer.lending import CUDA_IPC, lending_in_process
from tests.kv_transfer.nodes import World, handoff, open_world
from tests.kv_transfer.test_conformance import (
    test_a_node_sends_and_receives_at_the_same_time,
    test_kv_arrives_bit_by_bit,
    test_many_handoffs_interleave_and_each_arrives_whole,
    test_prompts_of_any_length_arrive_whole,
    test_the_end_may_be_pushed_after_all_tokens,
)

__all__ = [
    "test_a_node_sends_and_receives_at_the_same_time",
    "test_kv_arrives_bit_by_bit",
    "test_many_handoffs_interleave_and_each_arrives_whole",
    "test_prompts_of_any_length_arrive_whole",
    "test_the_end_may_be_pushed_after_all_tokens",
]


@pytest.fixture
def world() -> Iterator[World]:
    with lending_in_process(), open_world(CUDA_IPC) as opened:
        yield opened


def setting() -> LinkSetting:
    events: StreamEvents = SimpleQueue()
    return LinkSetting(
        events=events,
        clock=FakeClock(),
        host="127.0.0.1",
        timeout_s=10.0,
        kv=torch.empty(0),
        turns=Turns(),
    )


def stream() -> Stream:
    return LoopbackNetwork().open(SimpleQueue()).connect("nobody")


def closed(at: LinkSetting) -> str:
    (event,) = at.sources.read(20)
    assert isinstance(event, Closed)
    return str(event.error)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    opened = Listening(str(tmp_path / "line"))
    yield opened
    opened.close()


def test_the_largest_message_is_read_whole_and_a_window_of_them_need_not_be_read_at_once(
    listening: Listening,
) -> None:
    here, there = setting(), setting()
    ours = connect(listening.path, stream(), here)
    theirs = listening.accept(stream(), there)
    frame = Frame(
        seq=2**63,
        handoff=handoff("x" * 200),
        pieces=range(2**31 - MAX_LENT_CELLS, 2**31),
        heads=range(1),
        checksum=None,
    )
    blocks = tuple(map(BlockId, range(2**31 - MAX_LENT_CELLS, 2**31)))
    lent = Lent(blocks=blocks, first_piece=0, first_head=0, num_bytes=2**40)
    for _ in range(LENT.window):
        ours.send(Message(frame, lent))
    for _ in range(LENT.window):
        (came,) = there.sources.read(20)
        assert isinstance(came, Arrived)
        assert (came.message.body, came.message.payload) == (frame, lent)
    ours.close()
    theirs.close()


def test_only_its_owner_can_connect_and_the_name_is_gone_when_one_has(listening: Listening) -> None:
    path = Path(listening.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ours = connect(listening.path, stream(), setting())
    theirs = listening.accept(stream(), setting())
    assert not path.exists()
    ours.close()
    theirs.close()


def test_a_name_that_is_taken_or_too_long_is_an_error_that_takes_nothing_away(
    listening: Listening,
) -> None:
    for path in (listening.path, f"{listening.path}{'x' * 100}"):
        with pytest.raises(LinkDownError, match=f"there is no line at {path}"):
            Listening(path)
    assert Path(listening.path).exists()


def test_the_end_of_one_side_is_that_of_the_other(listening: Listening) -> None:
    here, there = setting(), setting()
    ours = connect(listening.path, stream(), here)
    theirs = listening.accept(stream(), there)
    ours.close()
    ours.close()
    assert "the other process closed the line" in closed(there)
    theirs.send(Message(Heartbeat()))  # into the void
    theirs.close()


def test_an_end_that_does_not_read_is_given_up_and_nobody_waits_for_it(
    listening: Listening,
) -> None:
    stopped = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stopped.connect(listening.path)
    here = setting()
    line: Line = listening.accept(stream(), here)
    while here.events.empty():
        line.send(Message(Heartbeat()))
    event = here.events.get()
    assert isinstance(event, Closed)
    assert "does not read its messages" in str(event.error)
    line.close()
    stopped.close()


def test_what_is_no_message_ends_the_line(listening: Listening) -> None:
    foe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    foe.connect(listening.path)
    here = setting()
    line = listening.accept(stream(), here)
    foe.send(b"\xff" * 9)
    assert "malformed message" in closed(here)
    line.close()
    foe.close()
