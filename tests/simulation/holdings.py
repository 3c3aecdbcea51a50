"""What the parts of a simulation hold for nobody at one moment, and how long that may last.

Whoever owns a request tells who works for it when that is not wanted any more: the client its
router, the router the decode node, that one the prefill node, each node its ranks. So everything
that is held is looked for with its owner; where the owner does not know of it, it may live for as
many link delays as there are messages from the owner's decision to the last block, and no longer.
Looks into what the parts hide, as nothing else would tell.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from decode_node.node import DecodeNode
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import HandoffId, RequestKey
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence
from prefill_node.node import PrefillNode
from tests.simulation.clients import Client
from tests.simulation.hosts import NodeHost, RouterHost

NOW = 0  # what one process decides, it does at once
TELL = 1  # a message
STEP = 2  # a step that runs: to the ranks and back
REPLACE = 2  # the end of the old one, and what was said because of it
DRAIN = 3  # the ranks are told, a piece that moves lands, the front is told
TELL_AND_DRAIN = TELL + DRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """``num_delays``: of a link, that it may live on. ``among``: who has to do with it. ``gone``:
    whose end has to be heard of; who is gone need not act.
    """

    thing: Hashable
    num_delays: int
    among: tuple[str, ...]
    gone: tuple[str, ...] = ()


class Holdings:
    """All parts of one simulation, through all their starts."""

    def __init__(
        self, nodes: dict[str, NodeHost], routers: list[RouterHost], clients: list[Client]
    ) -> None:
        self._nodes = nodes
        self._routers = {router.name: router for router in routers}
        self._clients = clients

    def unwanted(self) -> Iterator[Unwanted]:
        """Everything that is held for nobody, at parts that live."""
        for router in self._routers.values():
            if router.is_working:
                yield from self._of_router(router)
        for host in self._nodes.values():
            if host.is_working:
                node = host.node
                if isinstance(node, DecodeNode):
                    yield from self._of_decode(host, node)
                else:
                    yield from self._of_prefill(host, node)

    # ---- routers ----------------------------------------------------------------------------

    def _of_router(self, host: RouterHost) -> Iterator[Unwanted]:
        assert host.service is not None
        dispatcher, now_s = host.service.dispatcher, host.process.now_s()
        limit_s = dispatcher._limits.request_timeout_s
        for request_id, request in dispatcher._running.items():
            client = self._clients[int(request.label)]
            if client.is_over or client.has_left:
                yield _unwanted(host, "request whose client is gone", request_id, NOW)
            elif now_s > request.queued_s + limit_s:
                yield _unwanted(host, "request past its deadline", request_id, NOW)
        yield from self._waiting(host)
        yield from self._placed(host)
        yield from self._trials(host)

    def _waiting(self, host: RouterHost) -> Iterator[Unwanted]:
        """Places in the router's queues."""
        assert host.service is not None
        dispatcher, now_s = host.service.dispatcher, host.process.now_s()
        running, admission = dispatcher._running, dispatcher._admission
        for ticket in admission._queue:
            if ticket.request_id not in running:
                yield _unwanted(host, "place in the queue", ticket.request_id, NOW)
            elif now_s > ticket.deadline_s:
                yield _unwanted(host, "place past its deadline", ticket.request_id, NOW)
        parked = (key.request_id for key in dispatcher._parked)
        for request_id in {*dispatcher._first_legs, *parked} - running.keys():
            yield _unwanted(host, "leg to be started", request_id, NOW)
        if admission.num_admitted != len(running):
            yield _unwanted(host, "places", (admission.num_admitted, len(running)), NOW)

    def _placed(self, host: RouterHost) -> Iterator[Unwanted]:
        """What the router counts as its own on nodes."""
        assert host.service is not None
        dispatcher = host.service.dispatcher
        legs = [leg for r in dispatcher._running.values() for leg in r.legs.values()]
        keys, placements = {leg.key for leg in legs}, {leg.placement for leg in legs}
        for node, room in dispatcher._legs._head_room._nodes.items():
            for key in room.placed.keys() - keys:
                yield _unwanted(host, f"room on {node}", key, NOW)
        book = host.service.routing._load_book
        for ledger in (book._choices, book._tokens, book._context):
            for node, amounts in ledger._amounts.items():
                for placement in amounts.keys() - placements:
                    yield _unwanted(host, f"load on {node}", placement, NOW)

    def _trials(self, host: RouterHost) -> Iterator[Unwanted]:
        """A node that is tried by nobody keeps all others away."""
        assert host.service is not None
        requests = host.service.dispatcher._running.values()
        tried = {leg.node for request in requests for leg in request.legs.values()}
        for name, channel in host.service.channels._channels.items():
            if channel.breaker._trial_began_s is not None and name not in tried:
                yield _unwanted(host, "trial", name, NOW)

    # ---- decode nodes -----------------------------------------------------------------------

    def _of_decode(self, host: NodeHost, node: DecodeNode) -> Iterator[Unwanted]:
        for key, state in node._requests.items():
            router = self._routers[key.request_id.partition("/")[0]]
            if not _wants(router, host, key):
                yield _unwanted(host, "request", key, TELL, router)
                continue
            for choice, sequence in state._living.items():
                if len(sequence.choices) == 1 and not _wants_choice(router, key, choice):
                    yield _unwanted(host, "choice", (key, choice), TELL, router)
        if len(node._sessions) > len(self._routers):
            yield _unwanted(host, "sessions", len(node._sessions), REPLACE, *self._routers.values())
        scheduler = node.scheduler
        queued: set[Sequence] = {
            *scheduler._waiting,
            *scheduler._reserved,
            *scheduler._running,
            *(entry.sequence for entry in scheduler._local),
        }
        for sequence in queued:
            if sequence.key not in node._requests:
                yield _unwanted(host, "place in the scheduler", sequence.key, NOW)
        yield from self._of_legs(host, node)
        yield from self._of_partners(host)
        queued.update(leg.sequence for leg in node.legs._legs.values())
        yield from _of_ledger(host, scheduler.ledger, queued)

    def _of_legs(self, host: NodeHost, node: DecodeNode) -> Iterator[Unwanted]:
        """Prefills that were asked for, what the ranks know of them and who is tried with them."""
        legs = node.legs._legs
        for handoff, leg in legs.items():
            if leg.sequence.over:
                yield _unwanted(host, "leg that drains", handoff, DRAIN)
            elif leg.sequence.key not in node._requests:
                yield _unwanted(host, "leg", handoff, NOW)
        for endpoint in host.ranks.endpoints:
            for handoff in {*endpoint._incoming, *endpoint._unexpected} - legs.keys():
                yield _unwanted(host, f"expected handoff of rank {endpoint.rank}", handoff, TELL)
        tried = {leg.link.node for leg in legs.values()}
        for name, record in node._prefilling._breakers._records.items():
            for stage, breaker in record.breakers.items():
                if breaker._trial_began_s is not None and name not in tried:
                    yield _unwanted(host, f"trial of a {stage}", name, NOW)

    # ---- prefill nodes ----------------------------------------------------------------------

    def _of_prefill(self, host: NodeHost, node: PrefillNode) -> Iterator[Unwanted]:
        for handoff, prefill in node._prefills.items():
            peer_id = prefill.session.peer.peer_id
            decode = self._nodes[_name_of(peer_id)]
            if not _wants_kv(decode, peer_id, handoff):
                yield _unwanted(host, "prefill", handoff, TELL_AND_DRAIN, decode)
        scheduler = node.scheduler
        queued = {*scheduler._waiting, *scheduler._running}
        for sequence in queued:
            owner = node._by_sequence.get(sequence)
            if owner is None or owner.error is not None:
                yield _unwanted(host, "place in the scheduler", sequence.key, NOW)
        for handoff in node._link_meter._sending.keys() - node._prefills.keys():
            yield _unwanted(host, "measured handoff", handoff, NOW)
        for peer_id in node._sessions:
            if not self._runs(peer_id):
                yield _unwanted(host, "session", peer_id, TELL, gone=(_name_of(peer_id),))
        for endpoint in host.ranks.endpoints:
            for handoff in endpoint._outgoing.keys() - node._prefills.keys():
                yield _unwanted(host, f"sent handoff of rank {endpoint.rank}", handoff, TELL)
        yield from self._of_partners(host)
        yield from _of_ledger(host, scheduler.ledger, {*queued, *node._by_sequence})

    def _of_partners(self, host: NodeHost) -> Iterator[Unwanted]:
        """KV links with starts of nodes that are over."""
        for endpoint in host.ranks.endpoints:
            for peer_id in endpoint._partners:
                if not self._runs(peer_id):
                    what, gone = f"links of rank {endpoint.rank}", (_name_of(peer_id),)
                    yield _unwanted(host, what, peer_id, REPLACE, gone=gone)

    def _runs(self, incarnation: str) -> bool:
        host = self._nodes[_name_of(incarnation)]
        return host.running is not None and host.node.spec.incarnation == incarnation


def _name_of(incarnation: str) -> str:
    return incarnation.partition("#")[0]


def _of_ledger(host: NodeHost, ledger: Ledger, known: set[Sequence]) -> Iterator[Unwanted]:
    """Blocks and slots that no sequence has which the node knows, or a step that runs."""
    computed = {sequence for step in ledger._in_flight for sequence in step.sequences}
    for sequence in computed:
        if sequence.released:
            yield _unwanted(host, "sequence in a step", sequence, STEP)
    holders = known | computed
    num_slots = sum(sequence.slot is not None for sequence in holders)
    num_used = host.node.spec.pool.max_num_seqs - ledger.num_free_slots
    if num_used != num_slots:
        yield _unwanted(host, "slots", f"{num_used} of {num_slots}", NOW)
    owned = set(filter(ledger.pool.num_owners, map(BlockId, range(ledger.pool.num_blocks))))
    for sequence in holders:
        owned.difference_update(sequence.blocks)
    for step in ledger._in_flight:
        owned.difference_update(step.copied)
    for copy in ledger._copies._copies:
        owned -= {copy.source, copy.destination}
    for block in owned:
        yield _unwanted(host, "block", block, NOW)


def _wants(router: RouterHost, host: NodeHost, key: RequestKey) -> bool:
    if router.service is None:
        return False
    request = router.service.dispatcher._running.get(key.request_id)
    leg = None if request is None else request.legs.get(key.attempt)
    return leg is not None and leg.node == host.name


def _wants_choice(router: RouterHost, key: RequestKey, choice: int) -> bool:
    assert router.service is not None
    delivery = router.service.dispatcher._running[key.request_id].delivery
    return delivery._leg_of.get(choice) == key.attempt


def _wants_kv(decode: NodeHost, peer_id: str, handoff: HandoffId) -> bool:
    if decode.running is None or decode.node.spec.incarnation != peer_id:
        return False
    assert isinstance(decode.node, DecodeNode)
    leg = decode.node.legs.get(handoff)
    return leg is not None and not leg.sequence.over


def _unwanted(
    host: NodeHost | RouterHost,
    what: str,
    name: Hashable,
    num_delays: int,
    *owners: NodeHost | RouterHost,
    gone: tuple[str, ...] = (),
) -> Unwanted:
    among = (host.name, *(owner.name for owner in owners))
    thing = (host.process, what, name)
    return Unwanted(thing=thing, num_delays=num_delays, among=among, gone=gone)
