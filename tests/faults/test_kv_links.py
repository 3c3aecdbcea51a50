"""The gRPC connection between a prefill rank and a decode rank is cut, frozen, slowed, garbled,
corrupted and doubled while KV goes over it: it arrives bit by bit, or fails by name in time.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty

import pytest

from kv_transfer.commands import (
    AcceptPeer,
    ClosePeer,
    ConnectPeer,
    HandoffFailed,
    HandoffReceived,
    PeerConnected,
    PeerLost,
)
from tests.faults.proxy import FAULTS, Fault, Proxy, start_proxy
from tests.kv_transfer.nodes import CONFIG, LAYOUT, Node, blocks, handoff, open_world, prompt_kv

NUM_TOKENS = 480
TABLE = blocks(*range(30))
KV_BYTES = NUM_TOKENS * 4 * 2 * 2 * 64 * 4
CONFIG_OF_TESTS = replace(CONFIG, timeout_s=3.0)
PATIENCE_S = 30.0
KV_FAULTS: dict[str, Fault] = {**FAULTS, "corrupted": Proxy.corrupt}


class ProxyThread:
    """A proxy in a loop of its own: endpoints are driven from this thread."""

    def __init__(self, target: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.proxy = self._run(start_proxy(target, spoils_toward_caller=False))

    def do(self, fault: Fault, *, after_bytes: int) -> None:
        if after_bytes:
            self._loop.call_soon_threadsafe(lambda: self.proxy.arm(fault, after_bytes=after_bytes))
        else:
            self._loop.call_soon_threadsafe(fault, self.proxy)

    def close(self) -> None:
        self._run(self.proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


@contextmanager
def behind_a_proxy() -> Iterator[tuple[Node, Node, ProxyThread]]:
    """A prefill rank that reaches its decode rank through the proxy."""
    with open_world("grpc") as world:
        sender = world.node("p", config=CONFIG_OF_TESTS)
        receiver = world.node("d", config=CONFIG_OF_TESTS)
        proxy = ProxyThread(receiver.endpoints[0].address)
        try:
            meet(sender, receiver, proxy.proxy.address)
            yield sender, receiver, proxy
        finally:
            proxy.close()


def meet(sender: Node, receiver: Node, address: str) -> None:
    receiver.tell(AcceptPeer(peer=sender.peer))
    sender.tell(ConnectPeer(peer=replace(receiver.peer, addresses=(address,))))
    sender.wait(PeerConnected)
    receiver.wait(PeerConnected)


def outcome(node: Node) -> HandoffReceived | HandoffFailed | PeerLost:
    """The first event that settles a handoff. It comes in bounded time."""
    while True:
        try:
            event = node.endpoints[0].events.get(timeout=PATIENCE_S)
        except Empty:
            raise AssertionError("neither KV nor an error came") from None
        if isinstance(event, HandoffReceived | HandoffFailed | PeerLost):
            return event


@pytest.mark.parametrize(
    ("name", "after_bytes"),
    [
        pytest.param(
            name, after_bytes, marks=() if after_bytes and name == "cut" else pytest.mark.faults
        )
        for name in KV_FAULTS
        for after_bytes in (0, KV_BYTES // 4, KV_BYTES * 3 // 4)
    ],
)
def test_kv_arrives_bit_by_bit_or_fails_by_name(name: str, after_bytes: int) -> None:
    kv = prompt_kv(LAYOUT, NUM_TOKENS, seed=1)
    with behind_a_proxy() as (sender, receiver, proxy):
        sender.write(kv, TABLE)
        proxy.do(KV_FAULTS[name], after_bytes=after_bytes)
        receiver.expect(handoff("one"), "p", NUM_TOKENS, TABLE)
        sender.push(handoff("one"), "d", range(NUM_TOKENS), TABLE)
        came = outcome(receiver)
        if isinstance(came, HandoffReceived):
            assert receiver.holds(kv, TABLE)
        else:
            assert name != "slow", came
        proxy.do(Proxy.heal, after_bytes=0)

        sender.tell(ClosePeer(peer_id="d"))
        receiver.tell(ClosePeer(peer_id="p"))
        meet(sender, receiver, proxy.proxy.address)
        other = blocks(*range(30, 60))
        receiver.expect(handoff("two"), "p", NUM_TOKENS, other)
        sender.push(handoff("two"), "d", range(NUM_TOKENS), TABLE)
        receiver.wait(HandoffReceived, handoff("two"))
        assert receiver.holds(kv, other), "the pair that was made anew works"
