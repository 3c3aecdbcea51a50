"""The session of a decode node with a prefill node, without gRPC: what each says comes late.

As over a real stream: in order each way, lost when the stream is cut, and each side notices the end
in its own time.
"""

import asyncio
from dataclasses import dataclass
from functools import partial

from decode_node.channel import StreamLink
from decode_node.node import DecodeNode
from pdserve.rank.handshake import check_record, make_record
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from pdserve.rpc.v1 import session_pb2
from prefill_node.node import PrefillNode
from prefill_node.sessions import DecodeSession
from tests.fabric import FabricRanks
from tests.post import Deliver, HeldPost


@dataclass(eq=False)
class Member:
    """One node that runs: its front, its ranks, its tasks."""

    node: DecodeNode | PrefillNode
    ranks: FabricRanks
    tasks: list["asyncio.Task[None]"]
    is_dead: bool = False

    @property
    def decode(self) -> DecodeNode:
        assert isinstance(self.node, DecodeNode)
        return self.node

    @property
    def prefill(self) -> PrefillNode:
        assert isinstance(self.node, PrefillNode)
        return self.node


class Wire:
    """One session. ``tasks`` run until both sides have ended it."""

    def __init__(
        self,
        number: int,
        decode: Member,
        prefill: Member,
        post: HeldPost,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.is_over_at_decode = False
        self.tasks: list[asyncio.Task[None]] = []
        self._number = number
        self._decode = decode
        self._prefill = prefill
        self._post = post
        self._loop = loop
        self._is_cut = False
        self._to_prefill: Outbox[session_pb2.PrefillRequest] = Outbox()
        self._to_decode: Outbox[session_pb2.PrefillMessage] = Outbox()
        self._session: DecodeSession | None = None  # at the prefill node
        ours = make_record(decode.node.spec, decode.ranks)
        theirs = make_record(prefill.node.spec, prefill.ranks)
        name = prefill.node.spec.name
        self._decode_peer = check_record(theirs, ours)
        self.link = StreamLink(name, check_record(ours, theirs), self._to_prefill)
        self._up(self._greet)

    @property
    def is_over(self) -> bool:
        return self.is_over_at_decode or self._prefill.is_dead

    def cut(self) -> None:
        """The stream breaks."""
        if not self._is_cut:
            self._is_cut = True
            self._post.put(("cut up", self._number), self._end_at_prefill)
            self._post.put(("cut down", self._number), self._end_at_decode)

    # ---- from hello to links ----------------------------------------------------------------

    def _greet(self) -> None:
        if not self._prefill.is_dead:
            self._session = self._prefill.prefill.connect(self._decode_peer, self._to_decode)
            self.tasks.append(self._loop.create_task(self._pump_down(), name="pump down"))
            self._down(self._welcome)

    def _welcome(self) -> None:
        self._decode.decode.accept_link(self.link)
        self.tasks.append(self._loop.create_task(self._pump_up(), name="pump up"))
        self._up(self._make_links)

    def _make_links(self) -> None:
        if self._session is not None and not self._prefill.is_dead:
            self._prefill.prefill.make_links(self._session)

    # ---- messages ---------------------------------------------------------------------------

    async def _pump_up(self) -> None:
        """What the decode node says; when it says no more, the prefill node ends its side."""
        async for message in self._to_prefill:
            self._up(partial(self._at_prefill, message))
        self._up(self._end_at_prefill)

    async def _pump_down(self) -> None:
        async for message in self._to_decode:
            self._down(partial(self._at_decode, message))
        self._down(self._end_at_decode)

    def _at_prefill(self, message: session_pb2.PrefillRequest) -> None:
        if self._prefill.is_dead or self._session is None:
            return
        if message.HasField("prefill"):
            self._prefill.prefill.prefill(self._session, message.prefill)
        else:
            handoff = convert.handoff_from_proto(message.abort)
            self._prefill.prefill.abort(self._session, handoff)

    def _at_decode(self, message: session_pb2.PrefillMessage) -> None:
        if self.is_over_at_decode:
            return
        if message.HasField("links_ready"):
            self._decode.decode.open_link(self.link)
        else:
            self._decode.decode.on_prefill_outputs(self.link, message.outputs)

    # ---- ends -------------------------------------------------------------------------------

    def _end_at_prefill(self) -> None:
        if self._session is not None and not self._prefill.is_dead:
            self._prefill.prefill.disconnect(self._session, "the wire ended")
        self._session = None
        self._to_decode.close()

    def _end_at_decode(self) -> None:
        if not self.is_over_at_decode:
            self.is_over_at_decode = True
            self._decode.decode.close_link(self.link, "the wire ended")
            self._to_prefill.close()

    def _up(self, deliver: Deliver) -> None:
        self._post.put(("up", self._number), lambda: None if self._is_cut else deliver())

    def _down(self, deliver: Deliver) -> None:
        self._post.put(("down", self._number), lambda: None if self._is_cut else deliver())
