"""The decode nodes that are connected, and what each of them is still to be told."""

from kv_transfer.commands import Peer
from pdserve.core.request import HandoffId
from pdserve.engine.batch import Scored
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from pdserve.rpc.v1 import session_pb2


class DecodeSession:
    """One decode node. What one step gives for it goes out in one message."""

    def __init__(self, peer: Peer, outbox: Outbox[session_pb2.PrefillMessage]) -> None:
        self.peer = peer
        self.outbox = outbox
        self.connected_ranks: set[int] = set()  # ranks of this node whose links are up
        self._outputs = session_pb2.PrefillOutputs()
        self._is_empty = True

    def put_first_tokens(self, tokens: session_pb2.FirstTokens) -> None:
        self._outputs.first_tokens.append(tokens)
        self._is_empty = False

    def put_scored(self, handoff: HandoffId, scored: Scored) -> None:
        part = session_pb2.PromptPart(
            handoff=convert.handoff_to_proto(handoff),
            index=scored.start,
            logprobs=map(convert.prompt_logprob_to_proto, scored.logprobs),
        )
        self._outputs.prompt_parts.append(part)
        self._is_empty = False

    def put_failure(self, handoff: HandoffId, kind: str, message: str) -> None:
        failure = session_pb2.PrefillFailure(
            handoff=convert.handoff_to_proto(handoff), kind=kind, message=message
        )
        self._outputs.failures.append(failure)
        self._is_empty = False

    def flush(self) -> None:
        """Send what was put since the last flush."""
        if not self._is_empty:
            self.outbox.put(session_pb2.PrefillMessage(outputs=self._outputs))
            self._outputs = session_pb2.PrefillOutputs()
            self._is_empty = True
