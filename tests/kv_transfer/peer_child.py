"""A node in a process of its own, which comes to a stage of a transfer and stays there."""

from multiprocessing.connection import Connection

from kv_transfer.commands import AcceptPeer, ConnectPeer, HandoffReceived, Peer, PeerConnected
from pdserve.core.config import KvTransferConfig
from tests.kv_transfer.nodes import Node, World, blocks, handoff, prompt_kv

TABLE = blocks(1, 2, 3, 4)
NUM_TOKENS = 60
PART = 32  # tokens of a first push


def run_peer(
    role: str, transport: str, stage: str, config: KvTransferConfig, pipe: Connection
) -> None:
    """Tell our peer record, hear the other's, come to the stage, say so, wait to be killed."""
    node = World(transport).node(role, config=config)
    pipe.send(node.peer)
    other: Peer = pipe.recv()
    if role == "d":
        _receive(node, other, stage)
    else:
        _send(node, other, stage)
    pipe.send(stage)
    pipe.recv()


def _receive(node: Node, other: Peer, stage: str) -> None:
    if stage == "not welcome":
        return
    node.tell(AcceptPeer(peer=other))
    node.wait(PeerConnected)
    if stage in ("half received", "received"):
        node.expect(handoff("a"), other.peer_id, NUM_TOKENS, TABLE)
    if stage == "received":
        node.wait(HandoffReceived)


def _send(node: Node, other: Peer, stage: str) -> None:
    node.tell(ConnectPeer(peer=other))
    node.wait(PeerConnected)
    node.write(prompt_kv(node.layout, NUM_TOKENS, 1), TABLE)
    if stage == "half sent":
        node.push(handoff("a"), other.peer_id, range(PART), TABLE, last=False)
