"""Nodes and routers in this process, over real gRPC, with the ranks of ``tests/fabric.py``."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from decode_node.node import DecodeNode
from decode_node.server import RunningDecodeNode, start_decode_node
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.errors import NodeLostError, RankError
from pdserve.core.node import NodeAddress
from pdserve.rank.handshake import make_record
from pdserve.rank.running_node import RunningNode
from pdserve.rank.step_meter import StepMeter
from pdserve.rpc import convert
from pdserve.rpc.network import GrpcNetwork, Network
from pdserve.rpc.session import DEFAULT_SILENCE_S, PROTOCOL_VERSION, Outbox, listen
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from pdserve.telemetry.traces import Tracer
from prefill_node.node import PrefillNode
from prefill_node.server import start_prefill_node
from tests.fabric import Fabric, FabricRanks, make_layout
from tests.nodes.router import Hearing
from tests.nodes.specs import MODEL, Asked, make_spec
from tests.oracle import FakeModel
from tests.post import RunningPost
from tests.prompts import VOCAB_SIZE

PATIENCE_S = 10.0
HELLO = session_pb2.RouterHello(
    router_id="router-0",
    protocol_version=PROTOCOL_VERSION,
    model_fingerprint=MODEL.fingerprint,
)
HEARTBEAT = session_pb2.RouterMessage(heartbeat=session_pb2.Heartbeat())


class Site:
    """What runs, and how to start more. ``async with Site() as site`` ends all of it."""

    def __init__(
        self,
        *,
        longest_s: float = 0.002,
        silence_s: float = DEFAULT_SILENCE_S,
        network: Network | None = None,
    ) -> None:
        self._network = network or GrpcNetwork()
        self.model = FakeModel(VOCAB_SIZE)
        self.post = RunningPost(longest_s=longest_s)
        self.fabric = Fabric(self.post, self.model)
        self.ranks: dict[str, FabricRanks] = {}  # by node name
        self.nodes: dict[str, RunningNode | RunningDecodeNode] = {}
        self._silence_s = silence_s
        self._routers: list[RouterClient] = []
        self._num_starts = 0

    async def __aenter__(self) -> "Site":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(router.close() for router in self._routers))
        await asyncio.gather(*(node.close(0) for node in self.nodes.values()))

    @property
    def decode(self) -> RunningDecodeNode:
        node = self.nodes["decode-0"]
        assert isinstance(node, RunningDecodeNode)
        return node

    @property
    def prefill(self) -> PrefillNode:
        """The first one, ``p0``."""
        node = self.nodes["p0"].node
        assert isinstance(node, PrefillNode)
        return node

    def record(self, name: str) -> session_pb2.CompatibilityRecord:
        """What the node of that name tells those that it is paired with."""
        node = self.nodes[name].node
        assert isinstance(node, DecodeNode | PrefillNode)
        return make_record(node.spec, self.ranks[name])

    async def start_decode(
        self,
        config: DecodeConfig | None = None,
        *,
        meter: StepMeter | None = None,
        tracer: Tracer | None = None,
        **options,
    ) -> None:
        pool = config or DecodeConfig(max_num_seqs=32, max_num_batched_tokens=64)
        spec, ranks = self._prepare("decode-0", pool, **options)
        self.nodes["decode-0"] = await start_decode_node(
            spec,
            ranks,
            silence_s=self._silence_s,
            meter=meter,
            network=self._network,
            tracer=tracer,
        )

    async def start_prefill(
        self,
        name: str,
        config: PrefillConfig | None = None,
        *,
        meter: StepMeter | None = None,
        tracer: Tracer | None = None,
        **options,
    ) -> NodeAddress:
        """Start a prefill node, or start it anew; nobody is told."""
        pool = config or PrefillConfig(max_num_batched_tokens=32)
        spec, ranks = self._prepare(name, pool, **options)
        node = await start_prefill_node(
            spec,
            ranks,
            silence_s=self._silence_s,
            meter=meter,
            network=self._network,
            tracer=tracer,
        )
        self.nodes[name] = node
        return node.address

    async def switch(self, name: str, pool: DecodeConfig | PrefillConfig, **options) -> NodeAddress:
        """The node goes on in another role, with the same ranks; nobody is told."""
        self._num_starts += 1
        spec = make_spec(name, pool, start=self._num_starts, **options)
        await self.nodes[name].hand_over(spec.incarnation, "it changes its role")
        start = start_prefill_node if isinstance(pool, PrefillConfig) else start_decode_node
        self.nodes[name] = await start(
            spec, self.ranks[name], silence_s=self._silence_s, network=self._network
        )
        return self.nodes[name].address

    async def start_all(self, *prefills: str, **options) -> "RouterClient":
        """A decode node that is connected to prefill nodes, and a router."""
        await self.start_decode(**options)
        addresses = [await self.start_prefill(name, **options) for name in prefills]
        self.decode.set_prefill_nodes(tuple(addresses))
        router = await self.start_router()
        await router.until(lambda: router.connected == list(prefills))
        return router

    async def start_router(self) -> "RouterClient":
        router = RouterClient(self.decode.address.address)
        self._routers.append(router)
        await router.until(lambda: router.welcome is not None)
        return router

    async def kill(self, name: str) -> None:
        """The node's processes die at once."""
        self.ranks[name].fail(RankError("killed"))
        await self.nodes.pop(name).close(0)

    async def until_free(self) -> None:
        """Wait until every block of every node is free again."""
        async with asyncio.timeout(PATIENCE_S):
            while not all(map(is_free, self.nodes.values())):
                await self.post.pause(0.05)

    def _prepare(self, name: str, pool: DecodeConfig | PrefillConfig, **options):
        self._num_starts += 1
        num_blocks = options.pop("num_blocks", 64)
        spec = make_spec(name, pool, start=self._num_starts, **options)
        layout = make_layout(
            block_size=spec.block_size, tp_size=pool.tensor_parallel_size, dtype=spec.kv_dtype
        )
        ranks = self.ranks[name] = self.fabric.start(
            spec.incarnation, layout, num_blocks=num_blocks, num_slots=pool.max_num_seqs
        )
        return spec, ranks


class RouterClient:
    """One router's session with a decode node, from its first message on."""

    def __init__(
        self, address: str, *, has_heartbeat: bool = True, network: Network | None = None
    ) -> None:
        self.hearing = Hearing()
        self.welcome: session_pb2.NodeWelcome | None = None
        self.statuses: list[session_pb2.NodeStatus] = []
        self.lost: NodeLostError | None = None
        self.outbox: Outbox[session_pb2.RouterMessage] = Outbox(
            HEARTBEAT if has_heartbeat else None
        )
        self._network = network or GrpcNetwork()
        self._news = asyncio.Event()
        self.outbox.put(session_pb2.RouterMessage(hello=HELLO))
        self._task = asyncio.get_running_loop().create_task(self._run(address))

    @property
    def connected(self) -> list[str]:
        return list(self.statuses[-1].connected_prefill_nodes) if self.statuses else []

    def submit(self, asked: Asked) -> None:
        self.hearing.add(asked)
        message = convert.request_to_proto(asked.request)
        self.outbox.put(session_pb2.RouterMessage(submit=message))

    def abort(self, asked: Asked) -> None:
        asked.given_up = True
        key = asked.request.key
        message = session_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)
        self.outbox.put(session_pb2.RouterMessage(abort=message))

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that the decode node says; AssertionErrors of what it says wrongly
        come out here.
        """
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                if self._task.done():
                    self._task.result()
                    raise AssertionError(f"the session ended: {self.lost}")
                self._news.clear()
                await self._news.wait()

    async def until_begun(self, asked: Asked) -> None:
        """Wait until there is some output."""
        await self.until(lambda: asked.is_over or any(asked.got.values()))

    async def until_over(self, *requests: Asked) -> None:
        await self.until(lambda: all(asked.is_over for asked in requests))

    async def until_lost(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """The router is gone, without a word."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, address: str) -> None:
        try:
            async with self._network.channel(address) as channel:
                call = session_pb2_grpc.DecodeNodeStub(channel).Session(aiter(self.outbox))
                async with aclosing(listen(aiter(call), peer="decode-0")) as messages:
                    async for message in messages:
                        self._hear(message)
        except NodeLostError as error:
            self.lost = error
        finally:
            self._news.set()

    def _hear(self, message: session_pb2.DecodeMessage) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self.welcome = message.welcome
            case "status":
                self.statuses.append(message.status)
            case "outputs":
                self.hearing.hear(message.outputs)
        self._news.set()


def is_free(running: RunningNode | RunningDecodeNode) -> bool:
    """True if the node holds nothing."""
    node = running.node
    assert isinstance(node, DecodeNode | PrefillNode)
    ledger = node.scheduler.ledger
    ledger.pool.check()
    return ledger.pool.num_free == ledger.pool.num_blocks and not ledger.num_draining_blocks
