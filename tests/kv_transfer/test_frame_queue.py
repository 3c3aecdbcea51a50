"""The order of frames: short flows first, old ones never forgotten."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.frame_queue import AGED_TURN, Flow, FrameQueue, LinkId
from pdserve.core.request import HandoffId
from tests.fakes import FakeClock

PATIENCE_S = 1.0
FRAME = 100
LINK = LinkId("peer", 0)


def flow(name: str, rank: int = 0) -> Flow:
    return Flow(HandoffId(name, 0, 0), LinkId("peer", rank))


def queue(clock: FakeClock) -> FrameQueue:
    return FrameQueue(clock, patience_s=PATIENCE_S)


def test_the_flow_with_fewest_bytes_left_goes_first() -> None:
    frames = queue(FakeClock())
    frames.add(flow("huge"), 1000)
    frames.add(flow("small"), 150)
    order = []
    while (chosen := frames.choose({LINK})) is not None:
        order.append(chosen.handoff.request_id)
        frames.sent(chosen, 50)
    assert order == ["small"] * 3 + ["huge"] * 20


def test_of_equal_flows_the_older_goes_first() -> None:
    clock = FakeClock()
    frames = queue(clock)
    frames.add(flow("first"), 100)
    clock.advance(0.1)
    frames.add(flow("second"), 100)
    assert frames.choose({LINK}) == flow("first")


def test_only_flows_whose_link_has_room_are_chosen() -> None:
    frames = queue(FakeClock())
    frames.add(flow("small", rank=0), 1)
    frames.add(flow("huge", rank=1), 1000)
    assert frames.choose({LinkId("peer", 1)}) == flow("huge", rank=1)
    assert frames.choose(set()) is None


def test_a_removed_handoff_sends_nothing_more_on_any_link() -> None:
    frames = queue(FakeClock())
    for rank in (0, 1):
        frames.add(flow("gone", rank), 10)
    frames.add(flow("stays"), 1000)
    frames.remove(flow("gone").handoff)
    assert frames.choose({LINK, LinkId("peer", 1)}) == flow("stays")


@given(
    num_links=st.integers(1, 4),
    big_frames=st.integers(1, 20),
    closed=st.lists(st.sets(st.integers(0, 3), max_size=3), max_size=40),
)
@settings(max_examples=80)
def test_an_old_flow_gets_its_share_however_many_short_ones_keep_coming(
    num_links: int, big_frames: int, closed: list[set[int]]
) -> None:
    """New short flows on every link for each frame; the big one's link has room now and then."""
    clock = FakeClock()
    frames = queue(clock)
    big = flow("big", num_links - 1)
    frames.add(big, big_frames * FRAME)
    clock.advance(PATIENCE_S * 2)
    left, turns = big_frames, 0
    while left:
        for rank in range(num_links):
            frames.add(flow(f"small-{turns}", rank), 1)
        shut = closed[turns] if turns < len(closed) else set()
        room = {LinkId("peer", rank) for rank in range(num_links) if rank not in shut}
        if (chosen := frames.choose(room)) is not None:
            frames.sent(chosen, FRAME if chosen == big else 1)
            left -= chosen == big
        turns += 1
        assert turns <= len(closed) + big_frames * AGED_TURN * num_links


@given(num_old=st.integers(2, 5), num_links=st.integers(1, 3), old_frames=st.integers(1, 5))
@settings(max_examples=50)
def test_every_old_flow_is_done_in_the_end_while_short_ones_have_most_frames(
    num_old: int, num_links: int, old_frames: int
) -> None:
    clock = FakeClock()
    frames = queue(clock)
    left = {flow(f"old-{index}", index % num_links): old_frames for index in range(num_old)}
    for old in left:
        frames.add(old, old_frames * FRAME)
        clock.advance(0.01)
    clock.advance(PATIENCE_S * 2)
    links = {LinkId("peer", rank) for rank in range(num_links)}
    turns = 0
    while left:
        frames.add(flow(f"small-{turns}", turns % num_links), 1)
        chosen = frames.choose(links)
        assert chosen is not None
        frames.sent(chosen, FRAME if chosen in left else 1)
        if chosen in left:
            left[chosen] -= 1
            left = {old: num for old, num in left.items() if num}
        turns += 1
        assert turns <= (num_old * old_frames + num_links) * AGED_TURN * num_links
    assert turns >= (AGED_TURN - 1) * (num_old * old_frames - num_links)


@given(
    adds=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), min_size=1, max_size=30),
    frame=st.integers(1, 300),
)
def test_exactly_the_bytes_that_were_added_are_sent(
    adds: list[tuple[int, int]], frame: int
) -> None:
    frames = queue(FakeClock())
    left: dict[Flow, int] = {}
    for name, num_bytes in adds:
        frames.add(flow(str(name)), num_bytes)
        left[flow(str(name))] = left.get(flow(str(name)), 0) + num_bytes
    while (chosen := frames.choose({LINK})) is not None:
        assert left[chosen] == min(left.values())
        size = min(frame, left[chosen])
        frames.sent(chosen, size)
        left[chosen] -= size
        if not left[chosen]:
            del left[chosen]
    assert not left
