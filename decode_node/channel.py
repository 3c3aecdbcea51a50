"""The session with one prefill node: connect, shake hands, carry tasks and results, connect again.

One stream per pair carries all prefills. The pair lives as long as the stream: when it breaks, or a
KV link of it does, everything on it fails and the pair is made anew after a pause.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from decode_node.node import DecodeNode
from kv_transfer.commands import Peer
from pdserve.core.errors import HandshakeError, NodeLostError
from pdserve.core.node import NodeAddress
from pdserve.core.request import HandoffId
from pdserve.engine.sequence import Sequence
from pdserve.rank.handshake import check_record
from pdserve.rpc import convert
from pdserve.rpc.network import Network
from pdserve.rpc.session import Outbox, listen
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
HEARTBEAT = session_pb2.PrefillRequest(heartbeat=session_pb2.Heartbeat())


class StreamLink:
    """A ``PrefillLink`` over one stream's outbox."""

    def __init__(self, node: str, peer: Peer, outbox: Outbox[session_pb2.PrefillRequest]) -> None:
        self.node = node
        self.peer = peer
        self._outbox = outbox

    def ask(self, handoff: HandoffId, sequence: Sequence, traceparent: str | None) -> None:
        task = session_pb2.PrefillTask(
            handoff=convert.handoff_to_proto(handoff),
            token_ids=sequence.token_ids,
            prompt_len=sequence.prompt_len,
            choices=sequence.choices,
            sampling=convert.sampling_to_proto(sequence.sampling),
            start=sequence.num_cached,
            cache_salt=sequence.cache_salt,
            lane=sequence.lane,
            traceparent=traceparent or "",
            token_mask=sequence.token_mask or b"",
        )
        self._outbox.put(session_pb2.PrefillRequest(prefill=task))

    def cancel(self, handoff: HandoffId) -> None:
        key = convert.handoff_to_proto(handoff)
        self._outbox.put(session_pb2.PrefillRequest(abort=key))

    def close(self) -> None:
        self._outbox.close()

    def check(self) -> None:
        """Raises NodeLostError if the prefill node does not read what it is told."""
        self._outbox.check(self.node)


class PrefillChannel:
    """Keeps one pair connected until ``run`` is cancelled."""

    def __init__(
        self,
        node: DecodeNode,
        record: session_pb2.CompatibilityRecord,
        address: NodeAddress,
        silence_s: float,
        network: Network,
    ) -> None:
        self._node = node
        self._record = record
        self._address = address
        self._silence_s = silence_s
        self._network = network
        self._problem: str | None = None  # why it was not connected the last time

    async def run(self) -> None:
        """Connect, and again after each break, with a growing pause between failed tries."""
        pause_s = FIRST_PAUSE_S
        while True:
            if await self._run_session():
                pause_s = FIRST_PAUSE_S
            await _pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_session(self) -> bool:
        """One session from hello to its end; True if it had connected."""
        outbox: Outbox[session_pb2.PrefillRequest] = Outbox(idle_message=HEARTBEAT)
        outbox.put(session_pb2.PrefillRequest(hello=self._record))
        async with self._network.channel(self._address.address) as channel:
            call = session_pb2_grpc.PrefillNodeStub(channel).Session(aiter(outbox))
            heard = listen(aiter(call), peer=self._address.name, silence_s=self._silence_s)
            async with aclosing(heard) as messages:
                try:
                    link = await self._shake_hands(messages, outbox)
                    return await self._carry(link, messages)
                except (HandshakeError, NodeLostError) as error:
                    self._note(str(error))
                    return False
                finally:
                    outbox.close()
                    call.cancel()

    async def _shake_hands(
        self,
        messages: AsyncIterator[session_pb2.PrefillMessage],
        outbox: Outbox[session_pb2.PrefillRequest],
    ) -> StreamLink:
        message = await anext(messages, None)
        if message is None or not message.HasField("welcome"):
            raise NodeLostError(f"{self._address.name}: no welcome came")
        peer = check_record(self._record, message.welcome)
        if peer.peer_id != self._address.incarnation:
            raise NodeLostError(
                f"{self._address.name}: at {self._address.address} answers another start, "
                f"{peer.peer_id}"
            )
        link = StreamLink(self._address.name, peer, outbox)
        self._node.accept_link(link)
        outbox.put(session_pb2.PrefillRequest(links_welcome=session_pb2.LinksWelcome()))
        return link

    async def _carry(
        self, link: StreamLink, messages: AsyncIterator[session_pb2.PrefillMessage]
    ) -> bool:
        """Hand messages to the node until the session ends; True if the links had come up."""
        connected = False
        reason = "the session ended"
        try:
            async for message in messages:
                link.check()
                connected |= self._on_message(link, message)
        except NodeLostError as error:
            reason = str(error)
        finally:
            logger.warning("prefill node %s disconnected: %s", link.node, reason)
            self._node.close_link(link, reason)
        return connected

    def _on_message(self, link: StreamLink, message: session_pb2.PrefillMessage) -> bool:
        match message.WhichOneof("message"):
            case "links_ready":
                logger.info("prefill node %s connected", link.node)
                self._problem = None
                self._node.open_link(link)
                return True
            case "outputs":
                self._node.on_prefill_outputs(link, message.outputs)
        return False

    def _note(self, problem: str) -> None:
        """Log why the pair is not connected, once and not at each try."""
        if problem != self._problem:
            self._problem = problem
            logger.warning("prefill node not connected: %s", problem)


async def _pause(pause_s: float) -> None:
    """Wait before the next try to connect; nothing could announce that it will succeed."""
    await asyncio.sleep(pause_s)
