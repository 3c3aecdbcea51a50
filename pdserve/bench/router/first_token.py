"""What the router adds to the time to the first token: HTTP through it against the node's session.

Both ways ask the same fake node for one token, in turn, so that a busy machine slows both.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Self

import grpc

from pdserve.bench.router.streams import EVENT, Asked
from pdserve.core.node import NodeAddress
from pdserve.rpc.session import CHANNEL_OPTIONS, PROTOCOL_VERSION, Outbox
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc

TIMEOUT_S = 10.0
NUM_WARM = 20  # of each kind, not counted
END_OF_ANSWER = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Seconds from asking to the first token, each time."""

    routed_s: tuple[float, ...]
    direct_s: tuple[float, ...]


async def first_tokens(
    asked: Asked, node: NodeAddress, prompt_ids: list[int], num_requests: int
) -> FirstTokens:
    """Both ways in turn. ``asked`` is for one token."""
    routed, direct = [], []
    async with grpc.aio.insecure_channel(node.address, options=CHANNEL_OPTIONS) as channel:
        session = await _DirectSession.open(channel, prompt_ids)
        reader, writer = await asyncio.open_connection(asked.host, asked.port)
        for number in range(NUM_WARM + num_requests):
            async with asyncio.timeout(TIMEOUT_S):
                routed_s = await _routed(asked, reader, writer)
                direct_s = await session.first_token_s(f"direct-{number}")
            if number >= NUM_WARM:
                routed.append(routed_s)
                direct.append(direct_s)
        writer.close()
        session.close()
    return FirstTokens(routed_s=tuple(routed), direct_s=tuple(direct))


async def _routed(
    asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> float:
    """On a connection that is there already, as clients keep theirs."""
    start_s = time.perf_counter()
    writer.write(asked.as_bytes())
    await reader.readuntil(EVENT)
    duration_s = time.perf_counter() - start_s
    await reader.readuntil(END_OF_ANSWER)
    return duration_s


class _DirectSession:
    """The other side of the node's session, without a router."""

    def __init__(
        self,
        outbox: Outbox[session_pb2.RouterMessage],
        messages: AsyncIterator[session_pb2.DecodeMessage],
        prompt_ids: list[int],
    ) -> None:
        self._outbox = outbox
        self._messages = messages
        self._prompt_ids = prompt_ids

    @classmethod
    async def open(cls, channel: grpc.aio.Channel, prompt_ids: list[int]) -> Self:
        heartbeat = session_pb2.RouterMessage(heartbeat=session_pb2.Heartbeat())
        outbox: Outbox[session_pb2.RouterMessage] = Outbox(idle_message=heartbeat)
        hello = session_pb2.RouterHello(router_id="bench", protocol_version=PROTOCOL_VERSION)
        outbox.put(session_pb2.RouterMessage(hello=hello))
        call = session_pb2_grpc.DecodeNodeStub(channel).Session(aiter(outbox))
        messages = aiter(call)
        assert (await anext(messages)).WhichOneof("message") == "welcome"
        return cls(outbox, messages, prompt_ids)

    async def first_token_s(self, request_id: str) -> float:
        request = session_pb2.NodeRequest(
            request_id=request_id,
            token_ids=self._prompt_ids,
            prompt_len=len(self._prompt_ids),
            choices=[0],
            sampling=session_pb2.NodeSampling(max_tokens=1),
        )
        start_s = time.perf_counter()
        self._outbox.put(session_pb2.RouterMessage(submit=request))
        async for message in self._messages:
            if message.WhichOneof("message") == "outputs":
                return time.perf_counter() - start_s
        raise ConnectionError("the fake node closed the session")

    def close(self) -> None:
        self._outbox.close()
