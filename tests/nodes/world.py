"""Whole nodes in one event loop without gRPC: every message, step and KV piece is in the test's
hands.

The world is what lies between the nodes: sessions (``wire.py``), the KV fabric, routers. It says
what a test may do, and checks after everything what must hold.
"""

import asyncio
from dataclasses import dataclass
from random import Random

from decode_node.node import DecodeNode
from decode_node.requests import RouterSession
from pdserve.core.config import DecodeConfig, PrefillConfig
from pdserve.core.request import FinishReason, RouteTaken
from pdserve.rpc import convert
from pdserve.rpc.session import Outbox
from prefill_node.node import PrefillNode
from tests.fabric import Fabric, kinds_of, make_layout
from tests.fakes import FakeClock
from tests.nodes.router import Hearing
from tests.nodes.specs import Asked, make_spec
from tests.nodes.wire import Member, Wire
from tests.oracle import FakeModel
from tests.pools import empty_blocks
from tests.post import HeldPost
from tests.prompts import VOCAB_SIZE

TURNS = 12  # of the event loop, in which everything that can go on does


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What one node of the world is made of."""

    config: DecodeConfig | PrefillConfig
    num_blocks: int
    block_size: int = 4


@dataclass(eq=False)
class Router:
    """One router: its session with the decode node and what it hears."""

    session: RouterSession
    hearing: Hearing
    task: "asyncio.Task[None]"


class World:
    """A decode node, prefill nodes by name, two routers."""

    def __init__(self, decode: Pool, prefills: dict[str, Pool], *, depth: int = 1) -> None:
        self.loop = asyncio.new_event_loop()
        self.post = HeldPost()
        self.model = FakeModel(VOCAB_SIZE)
        self.fabric = Fabric(self.post, self.model)
        self.clock = FakeClock()
        self.asked: list[Asked] = []
        self.wires: dict[str, Wire] = {}
        self._depth = depth
        self._pools = prefills
        self._dead: list[Member] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._wires: list[Wire] = []  # that others have taken the places of
        self._num_starts = 0
        self._num_wires = 0
        self.decode = self._start("decode-0", decode)
        self.prefills = {name: self._start(name, pool) for name, pool in prefills.items()}
        self.routers = [self._open_router() for _ in range(2)]
        self.settle()

    # ---- what a test can do -----------------------------------------------------------------

    def submit(self, asked: Asked, router: int = 0) -> None:
        self.asked.append(asked)
        self.routers[router].hearing.add(asked)
        message = convert.request_to_proto(asked.request)
        self.decode.decode.submit(self.routers[router].session, message)
        self.settle()

    def abort(self, asked: Asked) -> None:
        """Its router wants nothing more of it."""
        self.settle()  # what was said before the abort is heard before it
        router = next(r for r in self.routers if asked in r.hearing.asked.values())
        self.decode.decode.abort(router.session, asked.request.key)
        asked.unwanted = True
        self.settle()

    def end_choice(self, asked: Asked, choice: int) -> None:
        """Its router wants nothing more of a choice, of which something has come."""
        self.settle()
        router = next(r for r in self.routers if asked in r.hearing.asked.values())
        asked.ended[choice] = FinishReason.ABORT
        self.decode.decode.end_choice(router.session, asked.request.key, choice)
        self.settle()

    def lose_router(self, i: int) -> None:
        """Its session ends; it comes back with a new one."""
        self.settle()
        router = self.routers[i]
        self.decode.decode.close_session(router.session)
        for asked in router.hearing.asked.values():
            asked.unwanted = asked.unwanted or not asked.is_over
        self.settle()
        router.session.outbox.close()
        self.routers[i] = self._open_router()
        self.settle()

    def connect(self, name: str) -> None:
        """A session with a prefill node, unless the decode node thinks that it has one.

        One with a node that is dead may not have been noticed to be over yet.
        """
        wire = self.wires.get(name)
        if wire is None or wire.is_over:
            self._wires += [wire] if wire is not None else []
            self._num_wires += 1
            prefill = self.prefills[name]
            self.wires[name] = Wire(self._num_wires, self.decode, prefill, self.post, self.loop)

    def cut_wire(self, name: str) -> None:
        if (wire := self.wires.get(name)) is not None:
            wire.cut()

    def kill_prefill(self, name: str) -> None:
        """The node is gone at once; another start of it takes its place."""
        dead = self.prefills[name]
        dead.is_dead = True
        for task in dead.tasks:
            task.cancel()
        self.fabric.end(dead.ranks.incarnation)
        self.cut_wire(name)
        self._dead.append(dead)
        self.prefills[name] = self._start(name, self._pools[name])
        self.settle()

    def cut_kv(self, name: str) -> None:
        """The KV links with a prefill node break."""
        self.fabric.cut(self.decode.ranks.incarnation, self.prefills[name].ranks.incarnation)
        self.settle()

    def bring(self, queue: int) -> None:
        """Deliver what is oldest in one of the queues that hold something."""
        if waiting := self.post.waiting:
            self.post.bring(waiting[queue % len(waiting)])
            self.clock.advance(0.01)
            self.settle()

    def bring_all_but(self, *held: str) -> None:
        """Deliver everything except in queues of these kinds, until only those hold something.

        Kinds are ``up`` and ``down`` (messages to and from prefill nodes), ``over`` (KV),
        ``steps``, ``commands``, ``events`` (of ranks); with a node's name before it, of that node.
        """
        while waiting := [queue for queue in self.post.waiting if not kinds_of(queue) & {*held}]:
            self.post.bring(waiting[0])
            self.clock.advance(0.01)
            self.settle()

    def bring_some(self, count: int, seed: int) -> None:
        random = Random(seed)
        for _ in range(count):
            self.bring(random.randrange(1 << 16))

    def connect_all(self) -> None:
        """All sessions and KV links come up, and nothing else happens."""
        for name in self.prefills:
            self.connect(name)
        while self.post.waiting:
            self.bring(0)

    def finish(self, seed: int = 0) -> None:
        """Deliver everything until nothing is on its way; then nothing may be left over."""
        random = Random(seed)
        num_tokens = sum(len(a.request.token_ids) for a in self.asked)
        num_tokens += sum(len(e) for a in self.asked for e in a.expected.values())
        for _ in range(5_000 + 200 * num_tokens):
            if not self.post.waiting:
                break
            self.bring(random.randrange(1 << 16))
        else:
            raise AssertionError("it goes on for ever")
        self.check_all_over()

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(_turns())
        for member in (self.decode, *self.prefills.values(), *self._dead):
            self.loop.run_until_complete(member.ranks.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    # ---- what must hold ---------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything go on that can, then check."""
        self.loop.run_until_complete(_turns())
        self.check()

    def check(self) -> None:
        """What holds at any time."""
        members = (self.decode, *self.prefills.values())
        wires = (*self.wires.values(), *self._wires)
        for task in (
            *(task for member in members for task in member.tasks),
            *(task for wire in wires for task in wire.tasks),
            *(router.task for router in self.routers),
        ):
            if task.done():
                task.result()
        for member in members:
            pool = member.node.scheduler.ledger.pool
            pool.check()
            in_use = set(member.ranks.blocks_in_use())
            assert all(pool.num_owners(block) for block in in_use), "freed while in use"
            member.ranks.executor.poison(empty_blocks(pool))
        num_wanted = sum(not asked.is_over for asked in self.asked)
        assert self.decode.decode.num_requests == num_wanted, "work that nobody waits for"

    def check_all_over(self) -> None:
        """Every request has its answer or a failure that its route allows; nothing is held."""
        for asked in self.asked:
            assert asked.is_over, f"waits for ever: {asked.request}"
            check_timelines(asked)
            if asked.failure is not None:
                assert asked.failure == "prefill_failed_error"
                assert asked.retryable
                assert not asked.request.route.local_allowed
        for member in (self.decode, *self.prefills.values()):
            scheduler, pool = member.node.scheduler, member.node.spec.pool
            assert scheduler.ledger.pool.num_free == scheduler.ledger.pool.num_blocks
            assert scheduler.ledger.num_draining_blocks == 0
            assert scheduler.ledger.num_free_slots == pool.max_num_seqs
            assert scheduler.num_waiting == scheduler.num_running == 0
        assert self.decode.decode.num_requests == 0
        assert len(self.decode.decode.legs) == 0
        assert all(member.prefill.num_prefills == 0 for member in self.prefills.values())

    # ---- private ----------------------------------------------------------------------------

    def _start(self, name: str, pool: Pool) -> Member:
        self._num_starts += 1
        config, block_size = pool.config, pool.block_size
        spec = make_spec(
            name, config, start=self._num_starts, block_size=block_size, depth=self._depth
        )
        layout = make_layout(block_size=block_size, tp_size=config.tensor_parallel_size)

        async def start() -> Member:
            ranks = self.fabric.start(
                spec.incarnation,
                layout,
                num_blocks=pool.num_blocks,
                num_slots=config.max_num_seqs,
            )
            node: DecodeNode | PrefillNode
            if isinstance(config, DecodeConfig):
                node = DecodeNode(spec, ranks, self.clock)
            else:
                node = PrefillNode(spec, ranks, self.clock)
            tasks = [
                self.loop.create_task(node.run(), name=f"{name} loop"),
                self.loop.create_task(node.run_kv_events(), name=f"{name} KV events"),
            ]
            return Member(node, ranks, tasks)

        return self.loop.run_until_complete(start())

    def _open_router(self) -> Router:
        session = RouterSession(Outbox())
        hearing = Hearing()
        self.decode.decode.open_session(session)
        task = self.loop.create_task(_listen(session, hearing))
        return Router(session, hearing, task)


def check_timelines(asked: Asked) -> None:
    """The timelines tell the truth as far as it can be known from outside."""
    if not asked.ended or asked.failure is not None or asked.unwanted:
        return
    first, last = asked.timelines  # with the first output and with the last
    assert first.stages == last.stages[: len(first.stages)]
    route = asked.request.route
    assert first.cached_tokens == last.cached_tokens <= asked.request.prompt_len
    if not route.prefill_nodes:
        assert last.route is RouteTaken.LOCAL
    else:
        assert last.route in (RouteTaken.DISAGGREGATED, RouteTaken.FALLBACK)
        assert route.local_allowed or last.route is RouteTaken.DISAGGREGATED
    assert all(stage.duration_s >= 0 for stage in last.stages)
    names = [stage.name for stage in last.stages]
    assert names[0] == "reserve"
    assert names.count("decode_queue") == names.count("first_decode") <= 1
    num_had = len(asked.request.token_ids) - asked.request.prompt_len
    # Each prefill brings a token: after one there is no need of KV if that was the last.
    num_prefills = names.count("prefill")
    whole = [c for c, reason in asked.ended.items() if reason is not FinishReason.ABORT]
    decodes = any(len(asked.expected[c]) > num_had + num_prefills for c in whole)
    if decodes and not last.num_preemptions:
        assert names[-2:] == ["decode_queue", "first_decode"]
    if last.route is RouteTaken.DISAGGREGATED:
        assert "prefill_queue" in names
        assert last.kv_bytes > 0 or not decodes
    elif not last.num_preemptions and len(asked.request.choices) == 1:
        assert last.kv_bytes == 0  # of several choices, some may have had theirs by handoff
    assert (last.transport is None) == (last.kv_bytes == 0)


async def _listen(session: RouterSession, hearing: Hearing) -> None:
    async for message in session.outbox:
        hearing.hear(message.outputs)


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)
