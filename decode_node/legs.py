"""A leg: one prefill that this node has asked another one for, until its KV is in or nothing of it
moves.
"""

from dataclasses import dataclass
from typing import Protocol

from decode_node.requests import RequestState
from kv_transfer.commands import Peer
from kv_transfer.handoff import ReceiverHandoff
from pdserve.core.request import HandoffId
from pdserve.engine.sequence import Sequence


class PrefillLink(Protocol):
    """The session with one prefill node, as the node uses it. Nothing here waits."""

    @property
    def node(self) -> str: ...

    @property
    def peer(self) -> Peer: ...

    def ask(self, handoff: HandoffId, sequence: Sequence) -> None:
        """Ask for the prefill of the sequence's tokens."""

    def cancel(self, handoff: HandoffId) -> None:
        """Nothing more of this handoff is wanted."""

    def close(self) -> None:
        """End the session; it is made anew after a while."""


@dataclass(slots=True, eq=False)
class Leg:
    """``is_ready``: all KV is in its blocks. The sequence joins when its first tokens are known
    too.
    """

    handoff: HandoffId
    link: PrefillLink
    state: RequestState
    sequence: Sequence
    receiver: ReceiverHandoff
    has_first_tokens: bool = False
    is_ready: bool = False
