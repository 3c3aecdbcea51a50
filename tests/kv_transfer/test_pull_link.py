"""The link whose receiver reads the sender's blocks: what is lent, taken back, refused."""

import gc
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from kv_transfer.commands import (
    CancelSend,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    PeerLost,
    PushTokens,
    SendDrained,
)
from kv_transfer.messages import (
    Announced,
    Body,
    CacheOffer,
    Delivered,
    Frame,
    Heartbeat,
    Message,
    Warm,
)
from kv_transfer.payload import Lent, Payload
from kv_transfer.transports.leases import NUM_PLACES, Leases, LeaseView
from kv_transfer.transports.line import Listening
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.pull_link import LocalLines, PullLink
from kv_transfer.transports.transport import Arrived, LinkSetting, Opened, StreamEvents
from kv_transfer.transports.turns import Turns
from pdserve.core.errors import LinkDownError, TransferError
from tests.fakes import FakeClock
from tests.kv_transfer.lending import CUDA_IPC, OwnMemory, lending_in_process
from tests.kv_transfer.nodes import LAYOUT, blocks, handoff
from tests.kv_transfer.threadless import Rank, connected_pair, settle

EXPECT = ExpectHandoff(
    handoff=handoff("a"), peer_id="p", start=0, num_tokens=40, blocks=blocks(4, 5, 6)
)
PUSH = PushTokens(
    handoff=handoff("a"), peer_id="d", start=0, stop=40, blocks=blocks(1, 2, 3), last=True
)
OURS, THEIRS = list(PUSH.blocks), list(EXPECT.blocks)


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    """Connected, the handoff expected, its KV computed and announced, the word on its way."""
    with lending_in_process("threadless_lent_link"):
        _, sender, receiver = connected_pair(LAYOUT, LAYOUT, CUDA_IPC)
        sender.cache[OURS] = 1.0
        receiver.receiver.expect(EXPECT)
        sender.sender.push(PUSH)
        while sender.sender.send_next():
            pass
        yield sender, receiver
        sender.close()
        receiver.close()


def reuse(sender: Rank) -> None:
    sender.cache[OURS] = 2.0


def test_the_receiver_copies_what_is_lent(pair: tuple[Rank, Rank]) -> None:
    sender, receiver = pair
    settle([sender, receiver])
    assert bool((receiver.cache[THEIRS] == 1.0).all())
    assert [type(event) for event in sender.said()] == [HandoffSent]
    assert [type(event) for event in receiver.said()] == [HandoffReceived]


def test_blocks_of_a_cancelled_handoff_are_free_at_once_and_a_late_copy_of_them_is_dropped(
    pair: tuple[Rank, Rank],
) -> None:
    sender, receiver = pair
    sender.sender.cancel(CancelSend(handoff=handoff("a")))
    assert [type(event) for event in sender.said()] == [SendDrained]
    reuse(sender)
    settle([sender, receiver])
    (failed,) = receiver.said()
    assert isinstance(failed, HandoffFailed)
    assert failed.message == "the sender took back what it had lent"
    assert not sender.said()


def test_a_receiver_that_wakes_up_after_its_sender_gave_it_up_drops_what_it_copies(
    pair: tuple[Rank, Rank],
) -> None:
    sender, receiver = pair
    sender.sender.close_peer("d", LinkDownError("the receiver was silent"))
    reuse(sender)
    settle([receiver])
    said = receiver.said()
    assert not [event for event in said if isinstance(event, HandoffReceived)]
    assert {type(event) for event in said} == {HandoffFailed, PeerLost}
    kinds = {event.kind for event in said if isinstance(event, HandoffFailed)}
    assert kinds == {"link_down_error"}, "the lease says so before the stream does"


def test_a_frame_that_waits_to_be_expected_is_copied_only_then(pair: tuple[Rank, Rank]) -> None:
    sender, receiver = pair
    late = PushTokens(
        handoff=handoff("b"), peer_id="d", start=0, stop=16, blocks=blocks(7), last=True
    )
    settle([sender, receiver])
    sender.sender.push(late)
    settle([sender, receiver])
    sender.cache[7] = 3.0
    receiver.receiver.expect(
        ExpectHandoff(handoff=handoff("b"), peer_id="p", start=0, num_tokens=16, blocks=blocks(8))
    )
    assert bool((receiver.cache[8] == 3.0).all())


# ---- the link alone


class End:
    def __init__(self) -> None:
        self.events: StreamEvents = SimpleQueue()
        self.memory = OwnMemory()
        self.setting = LinkSetting(
            events=self.events,
            clock=FakeClock(),
            host="127.0.0.1",
            timeout_s=10.0,
            kv=torch.zeros(4, *LAYOUT.block_shape),
            turns=Turns(),
        )
        self.link: PullLink

    def take(self) -> Arrived:
        event = self.events.get(timeout=20)
        assert isinstance(event, Arrived), f"{event}"
        return event

    def hear(
        self, body: Body, payload: Payload | None = None, announced: Announced | None = None
    ) -> Message | None:
        return self.link.on(Arrived(self.link._stream, Message(body, payload, announced)))


@pytest.fixture
def offered(tmp_path: Path) -> Iterator[CacheOffer]:
    """By a sender whose leases and line there are."""
    (tmp_path / "leases").write_bytes(bytes(8 * NUM_PLACES))
    listening = Listening(str(tmp_path / "line"))
    yield offer(str(tmp_path / "leases"), listening.path)
    listening.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    network, dialled, accepted = LoopbackNetwork(), End(), End()
    wires = network.open(dialled.events), network.open(accepted.events)
    stream = wires[0].connect(wires[1].address)
    opened = accepted.events.get()
    assert isinstance(opened, Opened)
    dialled.link = PullLink(stream, dialled.setting, dialled.memory, LocalLines())
    accepted.link = PullLink(opened.stream, accepted.setting, accepted.memory, LocalLines())
    yield dialled, accepted
    dialled.link.close()
    accepted.link.close()


def offer(leases: str, line: str) -> CacheOffer:
    return CacheOffer(
        memory=bytes(8),
        offset=0,
        num_blocks=1,
        num_heads=1,
        block_size=1,
        block_stride_bytes=1,
        leases=leases,
        line=line,
    )


def test_what_was_mapped_is_closed_with_its_link_once(
    ends: tuple[End, End], offered: CacheOffer
) -> None:
    """A mapping keeps the memory of a dead process alive."""
    accepted = ends[1]
    assert accepted.hear(offered) is None
    assert accepted.memory.mapped == [0]
    accepted.link.close()
    accepted.link.close()
    assert not accepted.memory.mapped


def test_a_cache_is_offered_once(ends: tuple[End, End], offered: CacheOffer) -> None:
    ends[1].hear(offered)
    with pytest.raises(LinkDownError, match="offered once"):
        ends[1].hear(offered)


LENT = Lent(blocks=blocks(1), first_piece=0, first_head=0, num_bytes=4)
FRAME = Frame(seq=0, handoff=handoff("a"), pieces=range(1), heads=range(1), checksum=None)


def test_a_frame_before_the_cache_is_offered_ends_the_link(ends: tuple[End, End]) -> None:
    with pytest.raises(LinkDownError, match="before their cache is offered"):
        ends[1].hear(FRAME, LENT)


def test_the_side_that_did_not_dial_offers_nothing(ends: tuple[End, End]) -> None:
    with pytest.raises(LinkDownError, match="by the side that dialled"):
        ends[0].hear(offer("/dev/null", "/dev/null"))


@pytest.mark.parametrize(
    ("body", "payload", "announced"),
    [
        (FRAME, torch.zeros(4, dtype=torch.uint8).numpy(), None),
        (Delivered(0), LENT, None),
        (Warm(), None, Announced(0, 4)),
    ],
)
def test_payloads_of_other_links_have_no_place_here(
    ends: tuple[End, End], body: Body, payload: Payload | None, announced: Announced | None
) -> None:
    with pytest.raises(LinkDownError, match="a payload"):
        ends[1].hear(body, payload, announced)


@pytest.mark.parametrize("name", ["no-such-file", "empty"])
def test_leases_that_this_process_can_not_read_are_named(
    ends: tuple[End, End], tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(LinkDownError, match="leases"):
        ends[1].hear(offer(str(tmp_path / name), "/dev/null"))


def test_a_line_that_this_process_can_not_reach_is_named(
    ends: tuple[End, End], tmp_path: Path, offered: CacheOffer
) -> None:
    with pytest.raises(LinkDownError, match="the sender's line can not be reached"):
        ends[1].hear(replace(offered, line=str(tmp_path / "nobody")))


def test_a_sender_whose_receiver_did_not_come_to_the_line_ends_the_link(
    ends: tuple[End, End],
) -> None:
    with pytest.raises(LinkDownError, match="did not come to the line"):
        ends[0].hear(Warm())


def test_what_follows_the_warms_goes_over_the_line(ends: tuple[End, End]) -> None:
    dialled, accepted = ends
    dialled.link.send(Message(Warm()))
    for _ in range(2):  # the offer, the warming
        accepted.link.on(accepted.take())
    accepted.link.send(Message(Warm()))
    assert dialled.link.on(dialled.take())
    for sender, receiver in (ends, ends[::-1]):
        sent = Message(Heartbeat())
        sender.link.send(sent)
        (came,) = receiver.setting.sources.read(20)
        assert isinstance(came, Arrived)
        assert came.message.body == sent.body


# ---- leases


def test_a_lease_holds_until_it_is_taken_back_or_its_place_is_lent_again(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    view = LeaseView(leases.path)
    assert not holds(view, 0)
    for seq in (3, 4):
        leases.lend(seq)
        assert holds(view, seq)
    leases.take_back(3)
    assert not holds(view, 3)
    assert holds(view, 4)
    leases.lend(4 + NUM_PLACES)
    assert not holds(view, 4)
    leases.take_back(4)
    assert holds(view, 4 + NUM_PLACES)


def test_leases_of_a_closed_link_are_told_from_those_taken_back(tmp_path: Path) -> None:
    """The receiver may look at them before the stream tells that the sender has gone."""
    leases = Leases(tmp_path)
    view = LeaseView(leases.path)
    leases.lend(1)
    leases.lend(2)
    leases.take_back(2)
    with pytest.raises(TransferError, match="took back") as taken_back:
        view.check(2)
    assert not isinstance(taken_back.value, LinkDownError)
    leases.close()
    for seq in (0, 1, 2):
        with pytest.raises(LinkDownError, match="connection lost: the sender closed the link"):
            view.check(seq)


def test_the_memory_of_leases_is_there_before_the_first_is_lent(tmp_path: Path) -> None:
    """A page that is missing then would end the process."""
    leases = Leases(tmp_path)
    assert Path(leases.path).stat().st_blocks
    leases.close()


NO_ROOM = """
import resource, sys
from pathlib import Path
from kv_transfer.transports.leases import Leases
from pdserve.core.errors import LinkDownError
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file may have a byte, as on a full disk
try:
    Leases(Path(sys.argv[1]))
except LinkDownError as error:
    print(error)
"""


def test_leases_for_which_there_is_no_room_are_named_and_leave_no_file(tmp_path: Path) -> None:
    """In another process: what pytest says may go to a file too."""
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path)]
    heard = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert heard.startswith(f"leases can not be made in {tmp_path}: ")
    assert "large" in heard
    assert not list(tmp_path.iterdir())


def holds(view: LeaseView, seq: int) -> bool:
    try:
        view.check(seq)
    except TransferError:
        return False
    return True


def test_the_file_is_its_owners_alone_and_is_gone_when_both_have_it(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    path = Path(leases.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    view = LeaseView(leases.path)
    leases.opened()
    assert not path.exists()
    leases.lend(1)
    assert holds(view, 1)
    leases.close()
    del leases, view
    gc.collect()  # the maps close without a warning
