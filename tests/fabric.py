"""A KV network for tests: the ranks of several nodes, with ``FakeExecutor`` for their compute.

Endpoints keep what ``kv_transfer/commands.py`` promises and nothing more, as late as they may: a
piece reads the sender's blocks when it lands, not when it is pushed; one that moves when a handoff
is cancelled still lands, and only then is the handoff drained. So blocks that were freed too early
are found by ``FakeExecutor``, on either side.
"""

import asyncio
import itertools
from collections.abc import Hashable, Iterator
from functools import partial

from kv_transfer.commands import KvCommand, KvEvent
from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.core.request import HandoffId
from pdserve.engine.batch import Batch
from pdserve.rank.ranks import Arrivals, Step
from tests.fabric_endpoint import Endpoint
from tests.fake_executor import FakeExecutor
from tests.oracle import FakeModel, History
from tests.post import Deliver, Post

NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 2, 4, 8


def make_layout(*, block_size: int, tp_size: int, dtype: str = "float32") -> KvLayout:
    return KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        block_size=block_size,
        dtype=dtype,
        tp_size=tp_size,
    )


def kinds_of(queue: Hashable) -> set[str]:
    """What kind of queue it is: ``over`` and ``back`` are links, the others the ranks' with their
    front; those also with their node's name before it.
    """
    assert isinstance(queue, tuple)
    if queue[0] in ("up", "down", "cut up", "cut down", "over", "back", "noticed"):
        return {str(queue[0])}
    owner, kind = queue[:2]
    kind = kind[0] if isinstance(kind, tuple) else kind  # of one rank
    return {str(kind), f"{str(owner).split('#')[0]} {kind}"}


class Fabric:
    """All ranks that can reach each other; every one is found by its node's incarnation."""

    def __init__(self, post: Post, model: FakeModel) -> None:
        self.post = post
        self.model = model
        self._nodes: dict[str, FabricRanks] = {}
        self._addresses: dict[str, tuple[str, int]] = {}
        self._ports = itertools.count(1)

    def start(
        self, incarnation: str, layout: KvLayout, *, num_blocks: int, num_slots: int
    ) -> "FabricRanks":
        """The ranks of one more node."""
        addresses = tuple(f"fabric:{next(self._ports)}" for _ in range(layout.tp_size))
        self._addresses.update({a: (incarnation, rank) for rank, a in enumerate(addresses)})
        executor = FakeExecutor(
            self.model,
            num_blocks=num_blocks,
            block_size=layout.block_size,
            num_slots=num_slots,
        )
        ranks = FabricRanks(self, incarnation, layout, executor, addresses, num_blocks)
        self._nodes[incarnation] = ranks
        return ranks

    def endpoint(self, address: str) -> Endpoint | None:
        """The endpoint that listens there, if it lives."""
        incarnation, rank = self._addresses[address]
        node = self._nodes.get(incarnation)
        return None if node is None else node.endpoints[rank]

    def rename(self, old: str, new: str) -> None:
        """A node's ranks are another incarnation's from now on."""
        self._nodes[new] = self._nodes.pop(old)
        self._addresses = {
            address: (new if incarnation == old else incarnation, rank)
            for address, (incarnation, rank) in self._addresses.items()
        }

    def end(self, incarnation: str) -> None:
        """A node's ranks are dead; whoever was linked with them will notice."""
        if (node := self._nodes.pop(incarnation, None)) is not None:
            for endpoint in node.endpoints:
                endpoint.die()

    def cut(self, one: str, other: str) -> None:
        """All KV links between two nodes break."""
        for incarnation, peer in ((one, other), (other, one)):
            if (node := self._nodes.get(incarnation)) is not None:
                for endpoint in node.endpoints:
                    endpoint.lose(peer, "cut")


class FabricRanks:
    """``Ranks`` of one node. Made by ``Fabric.start``."""

    def __init__(
        self,
        fabric: Fabric,
        incarnation: str,
        layout: KvLayout,
        executor: FakeExecutor,
        addresses: tuple[str, ...],
        num_blocks: int,
    ) -> None:
        self.incarnation = incarnation
        self.num_blocks = num_blocks
        self.layout = layout
        self.addresses = addresses
        self.pids = tuple(range(1000, 1000 + layout.tp_size))
        self.executor = executor
        self.endpoints = [Endpoint(fabric, self, rank) for rank in range(layout.tp_size)]
        self._fabric = fabric
        self._arrivals = Arrivals(step_timeout_s=60.0)
        self._landed: dict[HandoffId, list[int]] = {}  # tokens that each rank has got
        self._num_renamed = 0  # ranks that are the next incarnation's already

    @property
    def failed(self) -> asyncio.Future[RankError]:
        return self._arrivals.failed

    def submit(self, batch: Batch) -> Step:
        step = self._arrivals.expect(batch)
        if not self.failed.done():
            self.executor.submit(batch)
            self._put("steps", self._compute)
        return step

    def kv(self, command: KvCommand) -> None:
        if self.failed.done():
            return
        for endpoint in self.endpoints:
            self._put(("commands", endpoint.rank), partial(endpoint.handle, command))

    async def next_event(self) -> tuple[int, KvEvent]:
        return await self._arrivals.next_event()

    async def close(self) -> None:
        self.fail(RankError("the ranks are closed"))

    def fail(self, error: RankError) -> None:
        """The ranks are lost."""
        self._fabric.end(self.incarnation)
        self._arrivals.fail(error)

    # ---- for endpoints ----------------------------------------------------------------------

    def take_name(self, name: str) -> None:
        """An endpoint goes by it; when all do, others find the node by it."""
        self._num_renamed += 1
        if self._num_renamed == self.layout.tp_size:
            self._num_renamed = 0
            self._fabric.rename(self.incarnation, name)
            self.incarnation = name

    def tell(self, rank: int, event: KvEvent) -> None:
        """An endpoint reports to the front."""
        self._put(("events", rank), lambda: self._arrivals.event(rank, event))

    def read(self, blocks: tuple[BlockId, ...], stop: int) -> list[History]:
        """What positions [0, stop) hold; asserts that it is one history."""
        return self.executor.read(blocks, stop).nodes()

    def land(
        self,
        handoff: HandoffId,
        blocks: tuple[BlockId, ...],
        rank: int,
        first: int,
        start: int,
        nodes: list[History],
    ) -> None:
        """One rank's part of positions [start, len(nodes)) comes into the blocks.

        The handoff's first position is ``first``. Positions whose parts have not all come hold
        nothing that could be read.
        """
        landed = self._landed.setdefault(handoff, [first] * self.layout.tp_size)
        was_whole = min(landed)
        assert landed[rank] == start, "a piece is missing"
        landed[rank] = len(nodes)
        whole = min(landed)
        partly = self._fabric.model.history([-1])
        self.executor.write(blocks, start, [partly] * (len(nodes) - start))
        self.executor.write(blocks, was_whole, nodes[was_whole:whole])

    # ---- for tests --------------------------------------------------------------------------

    def blocks_in_use(self) -> Iterator[BlockId]:
        """Blocks that steps or handoffs may touch; none of them may be free."""
        yield from self.executor.blocks_in_flight()
        for endpoint in self.endpoints:
            yield from endpoint.blocks_in_use()

    def _compute(self) -> None:
        if self.failed.done():
            return
        self.executor.run_one()
        self._put("outputs", self._bring_output)

    def _bring_output(self) -> None:
        if not self.failed.done():
            self._arrivals.output(self.executor.output()[1])

    def _put(self, queue: Hashable, deliver: Deliver) -> None:
        self._fabric.post.put((self.incarnation, queue), deliver)
