"""A decode node without a model, in a process of its own: it says the same token again and again.

Speaks the node's side of the real session. A request's first token comes at once; then all its
sequences get one token a step, in one message, as from a real node. A step that the stream does not
take yet is waited for, so a slow router slows the node and fills no memory here.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from pdserve.core.node import NodeAddress, Role
from pdserve.rpc.session import CHANNEL_OPTIONS, HEARTBEAT_S, PROTOCOL_VERSION
from pdserve.rpc.v1 import inference_pb2, session_pb2, session_pb2_grpc

NAME, INCARNATION = "decode-0", "1"
NUM_BLOCKS, BLOCK_SIZE = 1 << 20, 16
MAX_MODEL_LEN = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Sequence:
    request: session_pb2.NodeRequest
    num_tokens: int = 0


@dataclass(slots=True)
class _Session:
    """What one router has here."""

    running: dict[tuple[str, int], _Sequence] = field(default_factory=dict)
    started: list[_Sequence] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def run_fake_node(connection: Connection, token_id: int, step_s: float) -> None:
    """The process: sends its address, serves until the other end of ``connection`` closes."""
    uvloop.run(_serve(connection, token_id, step_s))


def address_of(port: int) -> NodeAddress:
    return NodeAddress(
        name=NAME, role=Role.DECODE, incarnation=INCARNATION, address=f"127.0.0.1:{port}"
    )


async def _serve(connection: Connection, token_id: int, step_s: float) -> None:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    session_pb2_grpc.add_DecodeNodeServicer_to_server(_FakeNode(token_id, step_s), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection.send(address_of(port))
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(connection.recv)
    await server.stop(0)


class _FakeNode(session_pb2_grpc.DecodeNodeServicer):
    def __init__(self, token_id: int, step_s: float) -> None:
        self._token_id = token_id
        self._step_s = step_s

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.RouterMessage], context: Context
    ) -> AsyncIterator[session_pb2.DecodeMessage]:
        session = _Session()
        reading = asyncio.create_task(_read(session, request_iterator))
        try:
            yield session_pb2.DecodeMessage(welcome=_welcome())
            yield session_pb2.DecodeMessage(status=_status(session))
            async for message in self._messages(session):
                yield message
        finally:
            reading.cancel()

    async def _messages(self, session: _Session) -> AsyncIterator[session_pb2.DecodeMessage]:
        next_step_s = next_status_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= next_status_s:
                next_status_s = now_s + HEARTBEAT_S
                yield session_pb2.DecodeMessage(status=_status(session))
            if session.started:
                started, session.started = session.started, []
                yield self._step(session, started, first=True)
            if session.running and now_s >= next_step_s:
                next_step_s = max(next_step_s + self._step_s, now_s)
                yield self._step(session, list(session.running.values()), first=False)
            await _wait(session, next_step_s if session.running else next_status_s)

    def _step(
        self, session: _Session, sequences: list[_Sequence], *, first: bool
    ) -> session_pb2.DecodeMessage:
        message = session_pb2.DecodeMessage()
        outputs = message.outputs
        for sequence in sequences:
            request = sequence.request
            ends = sequence.num_tokens + 1 == request.sampling.max_tokens
            for choice in request.choices:
                outputs.outputs.add(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    choice=choice,
                    index=sequence.num_tokens,
                    token_ids=(self._token_id,),
                    finish_reason="length" if ends else "",
                )
            sequence.num_tokens += 1
            if first or ends:
                outputs.timelines.add(
                    request_id=request.request_id, attempt=request.attempt, timeline=_TIMELINE
                )
            key = (request.request_id, request.attempt)
            if ends:
                session.running.pop(key, None)
            elif first:
                session.running[key] = sequence
        return message


_TIMELINE = inference_pb2.Timeline(
    route="local", stages=[inference_pb2.Stage(name="prefill", node=NAME, duration_s=0.0)]
)


async def _read(session: _Session, messages: AsyncIterator[session_pb2.RouterMessage]) -> None:
    async for message in messages:
        match message.WhichOneof("message"):
            case "submit":
                session.started.append(_Sequence(message.submit))
                session.changed.set()
            case "abort":
                session.running.pop((message.abort.request_id, message.abort.attempt), None)


async def _wait(session: _Session, until_s: float) -> None:
    """Until a request comes, or until then."""
    session.changed.clear()
    if session.started:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(until_s - time.monotonic(), 0)):
            await session.changed.wait()


def _welcome() -> session_pb2.NodeWelcome:
    return session_pb2.NodeWelcome(
        node=NAME,
        role=Role.DECODE,
        incarnation=INCARNATION,
        protocol_version=PROTOCOL_VERSION,
        max_model_len=MAX_MODEL_LEN,
    )


def _status(session: _Session) -> session_pb2.NodeStatus:
    return session_pb2.NodeStatus(
        node=NAME,
        role=Role.DECODE,
        ready=True,
        total_blocks=NUM_BLOCKS,
        free_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        running=len(session.running),
    )
