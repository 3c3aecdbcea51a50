"""Two nodes that move handoffs while anything happens in any order: a model with every invariant.

Nothing here has threads: hypothesis decides which rank takes in its next message, which one sends a
frame, what fronts say, what links break. Each handoff has blocks of its own, filled with a value
that only its KV has; blocks are given back on Sent, Received or Drained, and nothing may be read
from or written to them after that.
"""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.commands import (
    CancelReceive,
    CancelSend,
    EndpointFailed,
    ExpectHandoff,
    HandoffFailed,
    HandoffReceived,
    HandoffSent,
    NameTaken,
    PeerConnected,
    PeerLost,
    PushTokens,
    ReceiveDrained,
    SendDrained,
)
from kv_transfer.messages import Frame, Message
from kv_transfer.payload import Bytes
from kv_transfer.reshard import exchange_unit
from kv_transfer.transports.loopback import LoopbackNetwork
from kv_transfer.transports.transport import Arrived, StreamEvent
from pdserve.core.errors import LinkDownError
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.core.request import HandoffId
from tests.fakes import FakeClock
from tests.kv_transfer.lending import CUDA_IPC, lending_in_process
from tests.kv_transfer.moving import Moving, Side
from tests.kv_transfer.nodes import handoff
from tests.kv_transfer.threadless import TIMEOUT_S, Rank, peer_of, settle

NUM_BLOCKS = 24
FRAME_BYTES = 96  # one to three pieces, or one head of a piece
FREE = -1.0  # what free blocks of the receiver hold
KV = KvLayout(num_layers=1, num_kv_heads=2, head_size=2, block_size=4, dtype="float32", tp_size=1)
PAIRS = [
    (KV, KV),
    (replace(KV, tp_size=2), replace(KV, block_size=6)),
    (replace(KV, block_size=6), replace(KV, tp_size=2)),
    (replace(KV, tp_size=4), replace(KV, tp_size=2, block_size=2)),
]
RARELY = st.sampled_from([*range(1, 13), 0])  # 0: now


class TwoNodes(RuleBasedStateMachine):
    transport = "loopback"

    @initialize(pair=st.sampled_from(PAIRS))
    def start(self, pair: tuple[KvLayout, KvLayout]) -> None:
        self.clock, network = FakeClock(), LoopbackNetwork()
        self.nodes = {
            name: [
                Rank(
                    name,
                    kv,
                    network.open,
                    self.clock,
                    rank=rank,
                    num_blocks=NUM_BLOCKS,
                    frame_bytes=FRAME_BYTES,
                )
                for rank in range(kv.tp_size)
            ]
            for name, kv in zip("pd", pair, strict=True)
        }
        self.unit = exchange_unit(*pair)
        self.free = {name: [BlockId(number) for number in range(NUM_BLOCKS)] for name in "pd"}
        for rank in self.nodes["d"]:
            rank.cache.fill_(FREE)
        self.moving: dict[HandoffId, Moving] = {}
        self.num_handoffs = 0
        self.connect()
        settle(self.ranks)

    @property
    def ranks(self) -> list[Rank]:
        return [*self.nodes["p"], *self.nodes["d"]]

    # ---- what fronts do

    @rule(side=st.sampled_from("pd"), luck=RARELY, again=st.booleans())
    def break_links(self, side: str, luck: int, again: bool) -> None:
        if luck:
            return
        self.is_broken = True
        error = LinkDownError("closed by the front")
        for rank in self.nodes[side]:
            rank.sender.close_peer("d", error)
            rank.receiver.close_peer("p", error)
        if again:
            self.connect()

    @rule()
    def connect_where_links_are_down(self) -> None:
        if self.is_broken:
            self.connect()

    def connect(self) -> None:
        self.is_broken = False
        for rank in self.nodes["d"]:
            rank.receiver.accept(peer_of(self.nodes["p"], self.transport))
        for rank in self.nodes["p"]:
            rank.sender.connect(peer_of(self.nodes["d"], self.transport))

    @rule(
        num_tokens=st.integers(1, 20),
        num_had=st.sampled_from([0, 0, 1, 2]),
        is_expected=st.booleans(),
        first_push=st.integers(0, 40),
    )
    def begin(self, num_tokens: int, num_had: int, is_expected: bool, first_push: int) -> None:
        layout = self.nodes["p"][0].layout
        if len(self.free["p"]) < layout.num_blocks_for(num_tokens):
            return
        self.num_handoffs += 1
        name = handoff(str(self.num_handoffs))
        out = self.allocate("p", num_tokens)
        block_size = self.nodes["d"][0].layout.block_size
        start = min(num_had, (num_tokens - 1) // block_size) * block_size
        value = float(self.num_handoffs)
        self.moving[name] = Moving(value, start, num_tokens, out, num_pushed=start)
        for rank in self.nodes["p"]:
            rank.cache[list(out.blocks)] = float(self.num_handoffs)
        if is_expected:
            self.do_expect(name)
        self.do_push(name, first_push)

    @rule(data=st.data())
    def expect(self, data: st.DataObject) -> None:
        if names := [name for name, moving in self.moving.items() if moving.into is None]:
            self.do_expect(data.draw(st.sampled_from(names)))

    @rule(data=st.data(), more=st.integers(1, 40))
    def push(self, data: st.DataObject, more: int) -> None:
        if names := [name for name, m in self.moving.items() if m.num_pushed < m.num_tokens]:
            self.do_push(data.draw(st.sampled_from(names)), more)

    def do_expect(self, name: HandoffId) -> None:
        moving = self.moving[name]
        if len(self.free["d"]) < self.nodes["d"][0].layout.num_blocks_for(moving.num_tokens):
            return
        moving.into = self.allocate("d", moving.num_tokens)
        expected = ExpectHandoff(
            handoff=name,
            peer_id="p",
            start=moving.start,
            num_tokens=moving.num_tokens,
            blocks=moving.into.blocks,
        )
        for rank in self.nodes["d"]:
            rank.receiver.expect(expected)

    def do_push(self, name: HandoffId, more: int) -> None:
        moving = self.moving[name]
        start, stop = moving.num_pushed, min(moving.num_pushed + more, moving.num_tokens)
        last = stop == moving.num_tokens
        stop = stop if last else stop - stop % self.unit
        if stop <= start or moving.out.is_cancelled:
            return
        moving.num_pushed = stop
        pushed = PushTokens(
            handoff=name, peer_id="d", start=start, stop=stop, blocks=moving.out.blocks, last=last
        )
        for rank in self.nodes["p"]:
            rank.sender.push(pushed)

    @rule(data=st.data())
    def sender_cancels(self, data: st.DataObject) -> None:
        if names := [n for n, m in self.moving.items() if not m.out.is_cancelled]:
            name = data.draw(st.sampled_from(names))
            self.moving[name].out.is_cancelled = True
            for rank in self.nodes["p"]:
                rank.sender.cancel(CancelSend(handoff=name))

    @rule(data=st.data(), midway=st.booleans())
    def receiver_cancels(self, data: st.DataObject, midway: bool) -> None:
        """Mostly one whose frames are under way."""
        sides = {name: m.into for name, m in self.moving.items() if m.into and m.into.users}
        if midway:
            for rank in self.nodes["p"]:
                rank.sender.send_next()
        if sides:
            name = data.draw(st.sampled_from(sorted(sides)))
            sides[name].is_cancelled = True
            for rank in self.nodes["d"]:
                rank.receiver.cancel(CancelReceive(handoff=name))

    # ---- what ranks and links do

    @rule(data=st.data(), times=st.integers(1, 8))
    def take_in(self, data: st.DataObject, times: int) -> None:
        rank = data.draw(st.sampled_from(self.ranks))
        for _ in range(times):
            rank.take_one()

    @rule(data=st.data(), times=st.integers(1, 3))
    def send(self, data: st.DataObject, times: int) -> None:
        rank = data.draw(st.sampled_from(self.nodes["p"]))
        for _ in range(times):
            rank.sender.send_next()

    @rule()
    def everything_arrives(self) -> None:
        settle(self.ranks)

    @rule(duration_s=st.floats(0, TIMEOUT_S), luck=RARELY)
    def time_passes(self, duration_s: float, luck: int) -> None:
        self.clock.advance(duration_s / (10 if luck else 1))
        for rank in self.ranks:
            rank.tend()

    @rule(data=st.data(), luck=RARELY)
    def a_frame_is_doubled_or_damaged(self, data: st.DataObject, luck: int) -> None:
        if luck > 4:
            return
        for rank in self.nodes["p"]:
            rank.sender.send_next()
        for rank in self.nodes["d"]:
            for event in [rank.inbox.get() for _ in range(rank.inbox.qsize())]:
                choices: list[tuple[StreamEvent, ...]] = [(event,)]
                if isinstance(event, Arrived) and isinstance(event.message.body, Frame):
                    choices.append((event, event))
                    if isinstance(event.message.payload, np.ndarray):
                        choices.append((_damaged(event, event.message.payload),))
                for item in data.draw(st.sampled_from(choices)):
                    rank.inbox.put(item)

    # ---- what must hold

    @invariant()
    def events_are_right(self) -> None:
        if not hasattr(self, "nodes"):
            return
        for rank in self.nodes["p"]:
            if self.take_events(rank, {name: m.out for name, m in self.moving.items()}):
                self.is_broken = True
                self.check_lost(rank, [m.out for m in self.moving.values() if m.has_pushed])
        for rank in self.nodes["d"]:
            expected = {name: m.into for name, m in self.moving.items() if m.into}
            if self.take_events(rank, expected):
                self.check_lost(rank, list(expected.values()))
        self.give_back()

    def take_events(self, rank: Rank, sides: dict[HandoffId, Side]) -> bool:
        """True if the rank has lost its peer."""
        said = rank.said()
        for event in said:
            if isinstance(event, PeerLost | PeerConnected):
                continue
            assert not isinstance(event, NameTaken | EndpointFailed)
            side, moving = sides[event.handoff], self.moving[event.handoff]
            if isinstance(event, HandoffSent | HandoffReceived):
                assert moving.num_pushed == moving.num_tokens
            if isinstance(event, HandoffReceived):
                self.check_received(rank, side, moving)
            if isinstance(event, SendDrained | ReceiveDrained):
                assert side.is_cancelled
            else:
                assert rank.rank not in side.ended, "a rank ended a handoff twice"
                side.ended.add(rank.rank)
            if not isinstance(event, HandoffFailed):
                side.users.discard(rank.rank)
        return any(isinstance(event, PeerLost) for event in said)

    @invariant()
    def free_blocks_are_left_alone(self) -> None:
        if hasattr(self, "nodes"):
            for rank in self.nodes["d"]:
                assert bool((rank.cache[self.free["d"]] == FREE).all())

    def check_lost(self, rank: Rank, sides: list[Side]) -> None:
        """A rank that lost its peer has ended all that it moved with it."""
        assert all(rank.rank in side.ended or side.is_cancelled for side in sides)

    def check_received(self, rank: Rank, side: Side, moving: Moving) -> None:
        got = rank.cache[list(side.blocks)].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        had, got = got.split((moving.start, got.shape[3] - moving.start), dim=3)
        got = got[:, :, :, : moving.num_tokens - moving.start]
        assert torch.equal(had, torch.full_like(had, FREE))
        assert torch.equal(got, torch.full_like(got, moving.value))

    def give_back(self) -> None:
        """Blocks that no rank uses any more are free; at the sender they get other contents."""
        for moving in self.moving.values():
            if not moving.out.users and moving.out.blocks:
                for rank in self.nodes["p"]:
                    rank.cache[list(moving.out.blocks)] = 1e9
                self.free["p"] += moving.out.blocks
                moving.out.blocks = ()
            if moving.into is not None and not moving.into.users and moving.into.blocks:
                for rank in self.nodes["d"]:
                    rank.cache[list(moving.into.blocks)] = FREE
                self.free["d"] += moving.into.blocks
                moving.into.blocks = ()

    def allocate(self, name: str, num_tokens: int) -> Side:
        layout = self.nodes[name][0].layout
        count = layout.num_blocks_for(num_tokens)
        taken, self.free[name] = self.free[name][:count], self.free[name][count:]
        return Side(tuple(taken), set(range(layout.tp_size)))

    def teardown(self) -> None:
        """In time all that was pushed has ended; what is cancelled gives blocks back at once."""
        if hasattr(self, "nodes"):
            self.let_everything_end()
            self.cancel_everything()
            self.events_are_right()
            assert len(self.free["p"]) == len(self.free["d"]) == NUM_BLOCKS
            for rank in self.ranks:
                rank.close()

    def let_everything_end(self) -> None:
        for _ in range(3 * (self.num_handoffs + 2)):  # a handoff not expected holds up the next
            settle(self.ranks)
            self.clock.advance(TIMEOUT_S / 4)
            for rank in self.ranks:
                rank.tend()
        self.events_are_right()
        for moving in self.moving.values():
            if moving.num_pushed == moving.num_tokens and not moving.out.is_cancelled:
                assert len(moving.out.ended) == len(self.nodes["p"])

    def cancel_everything(self) -> None:
        for name, moving in self.moving.items():
            moving.out.is_cancelled = True
            for rank in self.nodes["p"]:
                rank.sender.cancel(CancelSend(handoff=name))
            if moving.into is not None:
                moving.into.is_cancelled = True
                for rank in self.nodes["d"]:
                    rank.receiver.cancel(CancelReceive(handoff=name))


def _damaged(event: Arrived, payload: Bytes) -> StreamEvent:
    """The message with one byte of its payload changed."""
    changed = payload.copy()
    changed[0] ^= 1
    return Arrived(event.stream, Message(event.message.body, changed))


class TwoNodesThatLend(TwoNodes):
    """The receiver copies from the sender's blocks, whenever it gets there."""

    transport = CUDA_IPC

    @initialize(pair=st.sampled_from(PAIRS))
    def start(self, pair: tuple[KvLayout, KvLayout]) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(lending_in_process("threadless_lent_link"))
        TwoNodes.start(self, pair)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "stack"):
            self.stack.close()


TestTwoNodesUnderAnyInterleaving = TwoNodes.TestCase
TestTwoNodesThatLendUnderAnyInterleaving = TwoNodesThatLend.TestCase
for case in (TestTwoNodesUnderAnyInterleaving, TestTwoNodesThatLendUnderAnyInterleaving):
    case.settings = settings(max_examples=80, stateful_step_count=60)
