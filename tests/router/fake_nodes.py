"""Real gRPC servers that speak the nodes' sides of their sessions and say what a test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from pdserve.core.cost import DecodeCost, LinkCost, NodeCosts, PrefillCost
from pdserve.core.node import NodeAddress, Role
from pdserve.core.request import (
    FinishReason,
    PromptLogprob,
    PromptOutput,
    Request,
    RequestFailure,
    RequestKey,
    RouteTaken,
    TokenLogprobs,
    TokenOutput,
)
from pdserve.core.timeline import Stage, Timeline
from pdserve.rpc import convert
from pdserve.rpc.session import PROTOCOL_VERSION, Outbox
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
NUM_BLOCKS, BLOCK_SIZE = 1000, 16

# What fakes tell, not what they take: 1 ms a prompt token, 10 ms a decode step.
_PREFILL_COST = PrefillCost(a=0.0, b=0.001, c=0.0)
DECODE_COSTS = NodeCosts(prefill=_PREFILL_COST, decode=DecodeCost(a=0.010, b=0.0, c=0.0))
PREFILL_COSTS = NodeCosts(
    prefill=_PREFILL_COST, link=LinkCost(latency_s=0.0, s_per_byte=1e-6, token_bytes=100)
)


CACHED_TOKENS = 2  # of the prompt of each first attempt


class FakeSession:
    """A router's session, seen from the node."""

    def __init__(self) -> None:
        self.outbox: Outbox[session_pb2.DecodeMessage] = Outbox()
        self.broken = asyncio.Event()
        self.heartbeats = 0

    def say(
        self,
        request: Request,
        choice: int,
        index: int,
        token_ids: Sequence[int],
        *,
        finish: FinishReason | None = None,
        stop_token_id: int | None = None,
        attempt: int | None = None,
        logprob: float = -0.5,
    ) -> None:
        """Tokens of one choice; with log-probabilities where the request wants them."""
        output = TokenOutput(
            request_id=request.request_id,
            attempt=request.attempt if attempt is None else attempt,
            choice=choice,
            index=index,
            token_ids=tuple(token_ids),
            logprobs=_logprobs(request, token_ids, logprob),
            finish_reason=finish,
            stop_token_id=stop_token_id,
        )
        outputs = session_pb2.StepOutputs()
        convert.fill_output(outputs.outputs.add(), output)
        self.outbox.put(session_pb2.DecodeMessage(outputs=outputs))

    def score(self, request: Request, start: int = 1, stop: int | None = None) -> None:
        """Log-probabilities of the prompt's tokens; the token itself is third."""
        num_top = request.sampling.prompt_logprobs or 0
        logprobs = tuple(
            PromptLogprob(
                logprob=-1.0 * token_id,
                rank=3,
                top=tuple((top_id, -0.5 - top_id) for top_id in range(num_top)),
            )
            for token_id in request.token_ids[start : request.prompt_len if stop is None else stop]
        )
        output = PromptOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            index=start,
            logprobs=logprobs,
        )
        outputs = session_pb2.StepOutputs(prompt_outputs=[convert.prompt_output_to_proto(output)])
        self.outbox.put(session_pb2.DecodeMessage(outputs=outputs))

    def tell_timeline(self, request: Request, node: str, *, fallback: bool = False) -> None:
        prefill_nodes = () if fallback else request.route.prefill_nodes
        local = RouteTaken.FALLBACK if fallback else RouteTaken.LOCAL
        timeline = Timeline(
            route=RouteTaken.DISAGGREGATED if prefill_nodes else local,
            stages=(
                Stage(name="prefill", node=(prefill_nodes or (node,))[0], duration_s=0.01),
                Stage(name="first_decode", node=node, duration_s=0.002),
            ),
            kv_bytes=1024 * len(prefill_nodes),
            transport="grpc" if prefill_nodes else None,
            cached_tokens=CACHED_TOKENS if request.attempt == 0 else len(request.token_ids) - 1,
        )
        message = session_pb2.RequestTimeline(
            request_id=request.request_id,
            attempt=request.attempt,
            timeline=convert.timeline_to_proto(timeline),
        )
        outputs = session_pb2.StepOutputs(timelines=[message])
        self.outbox.put(session_pb2.DecodeMessage(outputs=outputs))

    def fail(self, request: Request, kind: str, message: str, *, retryable: bool) -> None:
        failure = RequestFailure(
            request_id=request.request_id,
            attempt=request.attempt,
            kind=kind,
            message=message,
            retryable=retryable,
        )
        outputs = session_pb2.StepOutputs(failures=[convert.failure_to_proto(failure)])
        self.outbox.put(session_pb2.DecodeMessage(outputs=outputs))

    def break_off(self) -> None:
        """The session ends with an error, as when the node dies."""
        self.broken.set()
        self.outbox.close()


Behaviour = Callable[["FakeDecodeNode", FakeSession, Request], Awaitable[None]]


async def answer(node: "FakeDecodeNode", session: FakeSession, request: Request) -> None:
    """The node's answer, a token a message, as a good node would give it."""
    start = len(request.token_ids) - request.prompt_len
    sampling = request.sampling
    session.tell_timeline(request, node.address.name)
    if sampling.prompt_logprobs is not None:
        session.score(request)
    for index in range(start, sampling.max_tokens):
        for choice in request.choices:
            if (request.key, choice) in node.ended:
                continue
            token_id = node.answer_ids[index % len(node.answer_ids)]
            ends = token_id in node.eos_token_ids and not sampling.ignore_eos
            ends = ends or token_id in sampling.stop_token_ids
            finish = FinishReason.STOP if ends else None
            if finish is None and index + 1 == sampling.max_tokens:
                finish = FinishReason.LENGTH
            session.say(
                request,
                choice,
                index,
                [token_id],
                finish=finish,
                stop_token_id=token_id if ends else None,
            )
            if finish is not None:
                node.ended.add((request.key, choice))
        await asyncio.sleep(node.token_time_s)
        if request.key in node.aborted:
            return


async def flood(node: "FakeDecodeNode", session: FakeSession, request: Request) -> None:
    """More than the buffers between a router and a client hold, without an end."""
    for index in range(0, 4000, 100):
        for choice in request.choices:
            session.say(request, choice, index, range(100))
        await asyncio.sleep(0.001)


async def silent(node: "FakeDecodeNode", session: FakeSession, request: Request) -> None:
    """Takes the request and says nothing."""


class FakeDecodeNode(session_pb2_grpc.DecodeNodeServicer):
    """Remembers what it was sent; ``behave`` answers each request in a task of its own."""

    def __init__(
        self,
        name: str,
        answer_ids: Sequence[int],
        *,
        behave: Behaviour = answer,
        eos_token_ids: Sequence[int] = (),
        prefill_nodes: Sequence[str] = (),
        max_model_len: int = 512,
    ) -> None:
        self.name = name
        self.answer_ids = tuple(answer_ids)
        self._first_behaviour = behave
        self.incarnation = 1
        self.eos_token_ids = frozenset(eos_token_ids)
        self.prefill_nodes = tuple(prefill_nodes)
        self.max_model_len = max_model_len
        self.ready = True
        self.refusal: str | None = None
        self.sessions: list[FakeSession] = []
        self.forget()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    def forget(self) -> None:
        """Be as at the start, with the same sessions."""
        self.behave = self._first_behaviour
        self.token_time_s = 0.0
        self.free_blocks = NUM_BLOCKS
        self.running = 0
        self.queued_tokens = 0
        self.submitted: list[Request] = []
        self.aborted: list[RequestKey] = []
        self.ended_choices: list[tuple[RequestKey, int]] = []
        self.ended: set[tuple[RequestKey, int]] = set()
        self.arrivals: asyncio.Queue[Request] = asyncio.Queue()

    @property
    def address(self) -> NodeAddress:
        return NodeAddress(
            name=self.name,
            role=Role.DECODE,
            incarnation=str(self.incarnation),
            address=f"127.0.0.1:{self.port}",
        )

    async def start(self) -> None:
        self._server = grpc.aio.server()
        session_pb2_grpc.add_DecodeNodeServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in self.sessions:
            session.break_off()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def tell_state(self) -> None:
        for session in self.sessions:
            session.outbox.put(session_pb2.DecodeMessage(status=self._status()))

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.RouterMessage], context: Context
    ) -> AsyncIterator[session_pb2.DecodeMessage]:
        first = await anext(aiter(request_iterator))
        assert first.WhichOneof("message") == "hello"
        if self.refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        session = FakeSession()
        self.sessions.append(session)
        reading = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield session_pb2.DecodeMessage(welcome=self._welcome())
            yield session_pb2.DecodeMessage(status=self._status())
            async for message in session.outbox:
                yield message
        finally:
            reading.cancel()
            self.sessions.remove(session)
        if session.broken.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the node broke off")

    async def _read(
        self, session: FakeSession, messages: AsyncIterator[session_pb2.RouterMessage]
    ) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    request = convert.request_from_proto(message.submit)
                    self.submitted.append(request)
                    self.arrivals.put_nowait(request)
                    task = asyncio.create_task(_run(self, session, request))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case "abort":
                    key = RequestKey(message.abort.request_id, message.abort.attempt)
                    self.aborted.append(key)
                case "end_choice":
                    ended = message.end_choice
                    key = RequestKey(ended.request_id, ended.attempt)
                    self.ended_choices.append((key, ended.choice))
                case "heartbeat":
                    session.heartbeats += 1

    def _welcome(self) -> session_pb2.NodeWelcome:
        return session_pb2.NodeWelcome(
            node=self.name,
            role=Role.DECODE,
            incarnation=str(self.incarnation),
            protocol_version=PROTOCOL_VERSION,
            max_model_len=self.max_model_len,
            ranks=[session_pb2.RankInfo(rank=0, pid=4711, host="127.0.0.1")],
        )

    def _status(self) -> session_pb2.NodeStatus:
        return session_pb2.NodeStatus(
            node=self.name,
            role=Role.DECODE,
            ready=self.ready,
            reason="" if self.ready else "not now",
            total_blocks=NUM_BLOCKS,
            free_blocks=self.free_blocks,
            block_size=BLOCK_SIZE,
            running=self.running,
            queued_prefill_tokens=self.queued_tokens,
            connected_prefill_nodes=self.prefill_nodes,
            prefill_chunk=256,
            costs=convert.costs_to_proto(DECODE_COSTS),
        )


async def _run(node: FakeDecodeNode, session: FakeSession, request: Request) -> None:
    await node.behave(node, session, request)


class FakePrefillNode(session_pb2_grpc.PrefillNodeServicer):
    """Can be watched, which is all that a router does with a prefill node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.gone = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> NodeAddress:
        return NodeAddress(
            name=self.name,
            role=Role.PREFILL,
            incarnation="1",
            address=f"127.0.0.1:{self.port}",
        )

    async def start(self) -> None:
        self._server = grpc.aio.server()
        session_pb2_grpc.add_PrefillNodeServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        self.gone.set()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def Session(
        self, request_iterator: AsyncIterator[session_pb2.PrefillRequest], context: Context
    ) -> AsyncIterator[session_pb2.PrefillMessage]:
        raise AssertionError("a router sends no prompts to a prefill node")

    async def Watch(
        self, request: session_pb2.RouterHello, context: Context
    ) -> AsyncIterator[session_pb2.WatchMessage]:
        welcome = session_pb2.NodeWelcome(
            node=self.name,
            role=Role.PREFILL,
            incarnation="1",
            protocol_version=PROTOCOL_VERSION,
            max_model_len=512,
        )
        yield session_pb2.WatchMessage(welcome=welcome)
        status = session_pb2.NodeStatus(
            node=self.name,
            role=Role.PREFILL,
            ready=True,
            total_blocks=NUM_BLOCKS,
            free_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            prefill_chunk=512,
            costs=convert.costs_to_proto(PREFILL_COSTS),
        )
        yield session_pb2.WatchMessage(status=status)
        await self.gone.wait()


def _logprobs(
    request: Request, token_ids: Sequence[int], logprob: float
) -> tuple[TokenLogprobs, ...]:
    wanted = request.sampling.logprobs
    if wanted is None:
        return ()
    return tuple(
        TokenLogprobs(
            logprob=logprob,
            top=tuple((token_id + i, logprob - i) for i in range(wanted)),
        )
        for token_id in token_ids
    )
