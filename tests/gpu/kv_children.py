"""Peers in processes of their own (``kv_peer.py``), and handoffs between them and a node here."""

import subprocess
import sys
from typing import IO

from kv_transfer.commands import AcceptPeer, ConnectPeer, ExpectHandoff, Peer, PushTokens
from tests.gpu.transfers import LAYOUT, NUM_TOKENS, TABLE
from tests.kv_transfer.nodes import Node, handoff


class Child:
    """A peer in a process of its own."""

    def __init__(self, peer_id: str, transport: str, device: str, *fate: object) -> None:
        self.peer_id = peer_id
        self._transport = transport
        words = peer_id, transport, device, *map(str, fate)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.kv_peer", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer:
        if self._peer is None:
            address = self.read().removeprefix("ready ")
            self._peer = Peer(
                peer_id=self.peer_id,
                layout=LAYOUT,
                transport=self._transport,
                addresses=(address,),
            )
        return self._peer

    def tell(self, command: str, peer_id: str, word: str = "-") -> None:
        pipe = _opened(self.process.stdin)
        pipe.write(f"{command} {peer_id} {word}\n")
        pipe.flush()

    def read(self) -> str:
        return _opened(self.process.stdout).readline().strip()

    def read_until(self, wanted: str) -> None:
        while (line := self.read()) != wanted:
            assert line, f"{self.peer_id} ended before it said {wanted}"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _opened(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def connect(survivor: Node, child: Child, role: str) -> None:
    address = survivor.peer.addresses[0]
    if role == "sender":
        survivor.tell(AcceptPeer(peer=child.peer))
        child.tell("connect", survivor.peer_id, address)
    else:
        child.peer  # noqa: B018 - waits until it is ready
        child.tell("accept", survivor.peer_id, address)
        survivor.tell(ConnectPeer(peer=child.peer))


def move(survivor: Node, child: Child, role: str, name: str) -> None:
    table = TABLE[: LAYOUT.num_blocks_for(NUM_TOKENS)]
    if role == "sender":
        survivor.tell(
            ExpectHandoff(
                handoff=handoff(name),
                peer_id=child.peer_id,
                start=0,
                num_tokens=NUM_TOKENS,
                blocks=TABLE[::-1][: len(table)],
            )
        )
        child.tell("push", survivor.peer_id, name)
    else:
        child.tell("expect", survivor.peer_id, name)
        survivor.tell(
            PushTokens(
                handoff=handoff(name),
                peer_id=child.peer_id,
                start=0,
                stop=NUM_TOKENS,
                blocks=table,
                last=True,
            )
        )
