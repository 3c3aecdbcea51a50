"""What fails below an endpoint: it is named, the rest goes on, and no drain is left unanswered."""

from pathlib import Path

import pytest

from kv_transfer.commands import (
    AcceptPeer,
    CancelReceive,
    CancelSend,
    ClosePeer,
    ConnectPeer,
    EndpointFailed,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    PeerLost,
    PushTokens,
    ReceiveDrained,
    SendDrained,
)
from kv_transfer.reasons import MAX_REASON_LEN, failed, lost
from pdserve.core.errors import InternalError, LinkDownError
from tests.kv_transfer.breaking import Stuck, stick
from tests.kv_transfer.lending import CUDA_IPC, in_place, lending_in_process
from tests.kv_transfer.nodes import (
    LAYOUT,
    Node,
    blocks,
    connect,
    handoff,
    layout,
    open_world,
    prompt_kv,
)
from tests.kv_transfer.threadless import connected_pair, settle

OURS, THEIRS = blocks(1, 2, 3), blocks(7, 8, 9)
LOOPBACK = "loopback"
FOR_EVER = 10**9


def move(sender: Node, receiver: Node, name: str) -> None:
    """A handoff of 40 tokens that must arrive."""
    kv = prompt_kv(sender.layout, 40, len(name))
    sender.write(kv, OURS)
    receiver.expect(handoff(name), sender.peer_id, 40, THEIRS)
    sender.push(handoff(name), receiver.peer_id, range(40), OURS)
    receiver.wait(HandoffReceived, handoff(name))
    sender.wait(HandoffSent, handoff(name))
    assert receiver.holds(kv, THEIRS)


@pytest.mark.parametrize(
    "link",
    [
        "unclosable_memory",
        "unclosable_group",
        "unclosable_file",
        "unclosable_for_no_known_reason",
    ],
)
@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_links_that_can_not_be_closed_are_gone_all_the_same(link: str, closer: str) -> None:
    with in_place(LOOPBACK, f"tests.kv_transfer.breaking:{link}"), open_world(LOOPBACK) as world:
        sender, receiver = world.pair(layout(tp_size=2), layout())
        receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
        sender.push(handoff("a"), receiver.peer_id, range(16), OURS, last=False)
        if closer == "sender":
            sender.tell(ClosePeer(peer_id="d"))
            receiver.wait(PeerLost)
        else:
            receiver.tell(ClosePeer(peer_id="p"))
            assert len(sender.wait(PeerLost)) == 2
        sender.wait(HandoffFailed, handoff("a"))
        receiver.wait(HandoffFailed, handoff("a"))
        receiver.tell(CancelReceive(handoff=handoff("a")))
        receiver.wait(ReceiveDrained, handoff("a"))
        connect(sender, receiver)
        move(sender, receiver, "again")


@pytest.mark.parametrize("link", ["one_link", "one_link_of_a_library"])
def test_a_peer_to_which_not_all_links_can_be_made_is_lost_and_no_link_to_it_is_left(
    link: str, tmp_path: Path
) -> None:
    with in_place(LOOPBACK, f"tests.kv_transfer.breaking:{link}"), open_world(LOOPBACK) as world:
        sender = world.node("p", layout(), directory=tmp_path)
        receiver = world.node("d", layout(tp_size=2), directory=tmp_path)
        sender.tell(ConnectPeer(peer=receiver.peer))
        (gone,) = sender.wait(PeerLost)
        assert gone.peer_id == "d"
        assert "no room for another link" in gone.reason
        (tmp_path / "full").unlink()
        successor = world.node("d2", layout(), directory=tmp_path)
        connect(sender, successor)
        move(sender, successor, "a")
        assert not sender.leftover(), "nothing more is told of what was never linked"


def test_a_peer_to_which_not_all_links_can_be_made_takes_no_other_along(tmp_path: Path) -> None:
    with in_place(LOOPBACK, "tests.kv_transfer.breaking:one_link"), open_world(LOOPBACK) as world:
        sender = world.node("p", layout(), directory=tmp_path)
        good = world.node("d", layout(), directory=tmp_path)
        connect(sender, good)
        sender.tell(ConnectPeer(peer=world.node("d2", layout(), directory=tmp_path).peer))
        assert sender.wait(PeerLost)[0].peer_id == "d2"
        move(sender, good, "a")


def test_a_peer_for_which_nothing_can_be_got_ready_is_lost_by_name_and_can_come_again() -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.node("p", layout(block_size=8)), world.node("d")
        for node in (sender, receiver):
            stick(node.endpoints[0]).num_failures = 1
        sender.tell(ConnectPeer(peer=receiver.peer))
        receiver.tell(AcceptPeer(peer=sender.peer))
        for node, peer_id in ((sender, "d"), (receiver, "p")):
            (gone,) = node.wait(PeerLost)
            assert gone.peer_id == peer_id
            assert "out of memory" in gone.reason
        receiver.tell(ClosePeer(peer_id="p"))
        connect(sender, receiver)


@pytest.mark.parametrize("depth", [0, 20])
def test_a_sender_that_can_not_lend_says_so_and_leaves_no_file(depth: int, tmp_path: Path) -> None:
    """There is no directory, or the path of a socket in it is too long."""
    directory = tmp_path.joinpath(*["deeper"] * depth) if depth else tmp_path / "none"
    if depth:
        directory.mkdir(parents=True)
    with lending_in_process(), open_world(CUDA_IPC) as world:
        sender, receiver = world.node("p", directory=directory), world.node("d")
        sender.tell(ConnectPeer(peer=receiver.peer))
        (gone,) = sender.wait(PeerLost)
        assert str(directory) in gone.reason
        assert not list(directory.glob("*"))


def test_files_of_links_lie_in_their_ranks_directory_until_the_links_are_up(tmp_path: Path) -> None:
    """What a sender that is killed meanwhile leaves is swept with what its node leaves."""
    with lending_in_process(), open_world(CUDA_IPC) as world:
        sender, receiver = world.node("p", directory=tmp_path), world.node("d")
        sender.tell(ConnectPeer(peer=receiver.peer))
        sender.tell(CancelSend(handoff=handoff("none")))
        sender.wait(SendDrained)  # the commands before are done
        names = sorted(path.name for path in tmp_path.iterdir())
        assert [name.removeprefix(names[0]) for name in names] == ["", ".line"]
        connect(sender, receiver)
        assert not list(tmp_path.iterdir())


# ---- no memory for a payload


def test_a_link_that_finds_no_memory_to_begin_with_is_lost_alone() -> None:
    with open_world(LOOPBACK) as world:
        sender, good = world.pair()
        other = world.node("d2")
        cache = stick(sender.endpoints[0])
        cache.lacking = {"blank"}
        other.tell(AcceptPeer(peer=sender.peer))
        sender.tell(ConnectPeer(peer=other.peer))
        (gone,) = sender.wait(PeerLost)
        assert gone.peer_id == "d2"
        assert "no memory for a payload: CUDA out of memory" in gone.reason
        move(sender, good, "a")
        cache.lacking = set()
        other.wait(PeerLost)
        connect(sender, other)


@pytest.mark.parametrize(("side", "lacking"), [("sender", "gather"), ("receiver", "scatter")])
def test_a_handoff_that_finds_no_memory_for_a_frame_fails_alone(side: str, lacking: str) -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        short = sender if side == "sender" else receiver
        cache = stick(short.endpoints[0])
        cache.lacking = {lacking}
        receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
        sender.push(handoff("a"), receiver.peer_id, range(40), OURS)
        (failure,) = short.wait(HandoffFailed, handoff("a"))
        assert failure.kind == "transfer_error"
        assert "no memory for a payload: CUDA out of memory" in failure.message
        sender.tell(CancelSend(handoff=handoff("a")))
        sender.wait(SendDrained, handoff("a"))
        receiver.tell(CancelReceive(handoff=handoff("a")))
        receiver.wait(ReceiveDrained, handoff("a"))
        cache.lacking = set()
        move(sender, receiver, "again")
        assert not [event for event in short.leftover() if isinstance(event, PeerLost)]


# ---- copies that can not be waited for


def begin_copies(sender: Node, receiver: Node, cache: Stuck, num_failures: int) -> None:
    """Three, at once: frames that came before their handoff is expected; a longer one is behind."""
    sender.push(handoff("a"), receiver.peer_id, range(40), OURS)
    receiver.expect(handoff("mark"), sender.peer_id, 64, blocks(20, 21, 22, 23))
    sender.push(handoff("mark"), receiver.peer_id, range(64), blocks(20, 21, 22, 23))
    receiver.wait(HandoffReceived, handoff("mark"))
    cache.num_failures = num_failures
    receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)


def test_copies_that_could_not_be_waited_for_once_are_waited_for_again() -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        cache = stick(receiver.endpoints[0])
        begin_copies(sender, receiver, cache, 1)
        assert "illegal memory access" in receiver.wait(PeerLost)[0].reason
        receiver.tell(CancelReceive(handoff=handoff("a")))
        receiver.wait(ReceiveDrained, handoff("a"))
        assert not cache.num_begun, "a copy was given up"
        sender.wait(PeerLost)
        connect(sender, receiver)
        move(sender, receiver, "again")


def test_a_cancel_whose_copies_could_not_be_waited_for_once_is_answered_when_they_were() -> None:
    _, sender, receiver = connected_pair(LAYOUT, LAYOUT)
    cache = stick(receiver.receiver)
    push = PushTokens(handoff=handoff("a"), peer_id="d", start=0, stop=40, blocks=OURS, last=True)
    expected = ExpectHandoff(
        handoff=handoff("a"), peer_id="p", start=0, num_tokens=40, blocks=THEIRS
    )
    receiver.receiver.expect(expected)
    sender.sender.push(push)
    settle([sender, receiver])
    assert receiver.receiver.is_copying
    cache.num_failures = 1
    with pytest.raises(RuntimeError):
        receiver.receiver.cancel(CancelReceive(handoff=handoff("a")))
    receiver.receiver.fail_all(InternalError("as the endpoint says then"))
    assert not cache.num_begun
    assert receiver.said()[-1] == ReceiveDrained(handoff=handoff("a"))
    sender.close()
    receiver.close()


def test_a_copy_that_could_not_be_looked_at_is_waited_for_before_it_is_drained() -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        cache = stick(receiver.endpoints[0])
        cache.num_blind = 1
        receiver.expect(handoff("a"), sender.peer_id, 40, THEIRS)
        sender.push(handoff("a"), receiver.peer_id, range(40), OURS)
        receiver.wait(PeerLost)
        receiver.tell(CancelReceive(handoff=handoff("a")))
        receiver.wait(ReceiveDrained, handoff("a"))
        assert not cache.num_begun, "a copy was given up"


def test_an_endpoint_whose_copies_are_never_over_says_so_and_drains_nothing() -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        cache = stick(receiver.endpoints[0])
        begin_copies(sender, receiver, cache, FOR_EVER)
        receiver.tell(CancelReceive(handoff=handoff("a")))
        (end,) = receiver.wait(EndpointFailed)
        assert "illegal memory access" in end.reason
        said = receiver.leftover()
        assert not [event for event in said if isinstance(event, HandoffReceived | ReceiveDrained)]


def push_some(sender: Node, receiver: Node) -> Stuck:
    """The sender's pieces, some of which are being gathered."""
    cache = stick(sender.endpoints[0])
    sender.push(handoff("a"), receiver.peer_id, range(32), OURS, last=False)
    receiver.expect(handoff("mark"), sender.peer_id, 64, blocks(20, 21, 22, 23))
    sender.push(handoff("mark"), receiver.peer_id, range(64), blocks(20, 21, 22, 23))
    receiver.wait(HandoffReceived, handoff("mark"))  # what was pushed before it is gathered
    sender.wait(HandoffSent, handoff("mark"))
    assert cache.num_gathering
    return cache


def test_a_sender_says_that_it_has_drained_when_nothing_is_gathered_any_more() -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        cache = push_some(sender, receiver)
        sender.tell(CancelSend(handoff=handoff("a")))
        sender.wait(SendDrained, handoff("a"))
        assert not cache.num_gathering


def test_a_drain_that_failed_once_is_answered_when_it_has_not() -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        cache = push_some(sender, receiver)
        cache.num_failures = 1
        sender.tell(CancelSend(handoff=handoff("a")))
        sender.wait(SendDrained, handoff("a"))
        assert not cache.num_gathering


@pytest.mark.parametrize("asked", ["close", "connect"])
def test_a_drain_that_failed_once_leaves_no_link_open(asked: str) -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        cache = push_some(sender, receiver)
        cache.num_failures = 1
        close, anew = ClosePeer(peer_id=receiver.peer_id), ConnectPeer(peer=receiver.peer)
        sender.tell(close if asked == "close" else anew)
        assert sender.wait(PeerLost)[0].peer_id == receiver.peer_id
        assert sender.wait(HandoffFailed, handoff("a"))[0].kind == "internal_error"
        assert receiver.wait(PeerLost)[0].reason == "the other side closed the stream"
        connect(sender, receiver)
        move(sender, receiver, "again")


@pytest.mark.parametrize("first", ["cancelled", "lost"])
def test_an_endpoint_whose_gathers_are_never_over_says_so_and_drains_nothing(first: str) -> None:
    with open_world(LOOPBACK) as world:
        sender, receiver = world.pair()
        cache = push_some(sender, receiver)
        cache.num_failures = FOR_EVER
        if first == "lost":
            sender.tell(ClosePeer(peer_id=receiver.peer_id))
        sender.tell(CancelSend(handoff=handoff("a")))
        (end,) = sender.wait(EndpointFailed)
        assert "illegal memory access" in end.reason
        assert not [event for event in sender.leftover() if isinstance(event, SendDrained)]


# ---- texts


def test_texts_of_errors_are_cut_and_keep_no_line_from_working() -> None:
    """A list of all blocks of a long prompt is longer than a message of a line may be."""
    with lending_in_process(), open_world(CUDA_IPC) as world:
        sender, receiver = world.pair()
        receiver.expect(handoff("a"), sender.peer_id, 16 * 40_000, blocks(*range(40_000)))
        events = receiver.wait(HandoffFailed, handoff("a"))
        sender.push(handoff("a"), receiver.peer_id, range(40), OURS)
        events += sender.wait(HandoffFailed, handoff("a"))
        for event in events:
            assert event.message.startswith(("a block of [0, 1, 2", "the handoff failed: a block"))
            assert len(event.message) == MAX_REASON_LEN
        move(sender, receiver, "again")


@pytest.mark.parametrize("num_characters", [0, MAX_REASON_LEN, MAX_REASON_LEN + 1, 10**6])
def test_a_peers_words_reach_the_front_cut(num_characters: int) -> None:
    said = "x" * num_characters
    event = failed(handoff("a"), said, said)
    for text in (event.kind, event.message, lost("p", LinkDownError(said)).reason):
        assert len(text) == min(num_characters, MAX_REASON_LEN)
        assert said.startswith(text.removesuffix("…"))
