"""How sequences of a decode node come by the KV of their prompts: their routes, walked.

    start ──> a leg to the next prefill node of the route that works ──> joins the running batch
      |          `── it fails: another life of the sequence, to be started at the next stop
      |──> the route is at its end: this node itself, in chunks
      `──> not even that is allowed: the error

Owns who is asked and what its failures say of it (``prefill_breakers.py``); how one leg goes is
``legs.py``. Does what ranks and prefill nodes tell at once; what the scheduler decides then is the
node's to take.
"""

import logging

from decode_node.intake import read_first_tokens, read_prompt_part
from decode_node.legs import Arrived, Failed, Leg, LegNews, Legs, PrefillLink
from decode_node.prefill_breakers import PrefillBreakers
from decode_node.requests import RequestState
from decode_node.scheduler import DecodeScheduler
from kv_transfer.commands import (
    HandoffFailed,
    HandoffReceived,
    KvEvent,
    PeerConnected,
    PeerLost,
    ReceiveDrained,
)
from pdserve.core.breaker import Trouble
from pdserve.core.clock import Clock
from pdserve.core.errors import LinkDownError, PrefillFailedError
from pdserve.core.request import RouteTaken
from pdserve.engine.sequence import Sequence
from pdserve.rank.node_metrics import NodeMetrics
from pdserve.rank.readiness import Readiness
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2

logger = logging.getLogger(__name__)


class Prefilling:
    """Part of one node, in its event loop."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        legs: Legs,
        *,
        readiness: Readiness,
        metrics: NodeMetrics,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._legs = legs
        self._readiness = readiness
        self._metrics = metrics
        self._clock = clock
        self._breakers = PrefillBreakers()

    @property
    def working_nodes(self) -> list[str]:
        """Those that a sequence would be sent to now."""
        return list(filter(self._link_that_works, self._legs.connected))

    def troubles(self) -> list[Trouble]:
        """What fails again and again, as routers are told."""
        return self._breakers.troubles(self._clock.now_s())

    # ---- links ------------------------------------------------------------------------------

    def accept(self, link: PrefillLink) -> None:
        """A prefill node that fits is about to connect its ranks with ours."""
        self._breakers.meet(link.node, link.peer.peer_id)
        self._legs.accept(link)

    def open(self, link: PrefillLink) -> None:
        """The pair is connected and warm."""
        self._legs.open(link)
        self._readiness.tell()

    def close(self, link: PrefillLink, reason: str) -> None:
        """The pair is over: what was asked of it goes on elsewhere."""
        self._on_news(self._legs.close(link, reason))
        self._readiness.tell()

    # ---- sequences --------------------------------------------------------------------------

    def start(self, state: RequestState, sequence: Sequence) -> PrefillFailedError | None:
        """Have a reserved sequence prefilled by the next stop of its route; why it can not be."""
        while (node := state.next_alternate(sequence)) is not None:
            if (link := self._link_that_works(node)) is not None:
                self._breakers.sent(node, self._clock.now_s())
                state.take_route(RouteTaken.DISAGGREGATED)
                self._legs.start(state, sequence, link)
                return None
        route = state.request.route
        if route.prefill_nodes and not route.local_allowed:
            reason = state.last_failure or "no prefill node of its route is connected"
            return PrefillFailedError(f"prefill: {reason}")
        is_routed_here = not route.prefill_nodes
        state.take_route(RouteTaken.LOCAL if is_routed_here else RouteTaken.FALLBACK)
        state.count_cached(sequence.num_cached)
        self._scheduler.prefill_locally(sequence, budgeted=is_routed_here)
        state.timing.local_started(self._clock.now_s())
        return None

    def on_prompt_part(self, link: PrefillLink, part: session_pb2.PromptPart) -> None:
        """A prefill node has computed a chunk of a prompt whose log-probabilities are wanted."""
        leg = self._leg(link, part.handoff)
        if leg is None or leg.sequence.over or leg.has_first_tokens:
            return
        try:
            leg.state.put_scored(read_prompt_part(part, leg.sequence))
        except PrefillFailedError as error:
            self._on_news([Failed(leg, error.kind, str(error))])

    def drop(self, sequence: Sequence) -> None:
        """The sequence is over: what is still done for it elsewhere is not wanted."""
        if (leg := self._legs.leg_of(sequence)) is not None:
            self._breakers.released(leg.link.node)
            self._legs.drop(sequence)

    def on_first_tokens(self, link: PrefillLink, tokens: session_pb2.FirstTokens) -> None:
        """A prefill node has computed a prompt."""
        leg = self._leg(link, tokens.handoff)
        if leg is None or leg.sequence.over or leg.has_first_tokens:
            return
        try:
            first = read_first_tokens(tokens, leg.sequence)
        except PrefillFailedError as error:
            self._on_news([Failed(leg, error.kind, str(error))])
            return
        now_s = self._clock.now_s()
        leg.state.timing.prefilled(now_s, link.node, tokens.queue_s, tokens.prefill_s)
        leg.state.count_cached(tokens.cached_tokens)
        self._breakers.prefilled(link.node)
        leg.has_first_tokens = True
        self._scheduler.first_tokens(leg.sequence, first)
        if leg.is_ready and not leg.sequence.over:
            self._join(leg)

    def on_failure(self, link: PrefillLink, failure: session_pb2.PrefillFailure) -> None:
        """A prefill node could not do what it was asked for."""
        if (leg := self._leg(link, failure.handoff)) is not None:
            self._on_failures([Failed(leg, failure.kind, failure.message)])

    def on_kv_event(self, rank: int, event: KvEvent) -> None:
        """A rank of this node tells of its links and of what comes over them."""
        match event:
            case PeerConnected():
                pass  # the prefill node says when the whole pair is ready
            case PeerLost(peer_id=peer_id, reason=reason):
                for link in self._legs.links_with(peer_id):
                    now_s = self._clock.now_s()
                    self._breakers.failed(link.node, LinkDownError("").kind, reason, now_s)
                    self.close(link, f"KV link: {reason}")
                    link.close()
            case HandoffReceived() | HandoffFailed() | ReceiveDrained():
                self._on_failures(self._legs.on(rank, event))
            case _:
                raise AssertionError(f"a decode rank sent {event}")

    # ---- private ----------------------------------------------------------------------------

    def _leg(self, link: PrefillLink, handoff: session_pb2.HandoffKey) -> Leg | None:
        """The leg that this link may speak of."""
        leg = self._legs.get(convert.handoff_from_proto(handoff))
        return leg if leg is not None and leg.link is link else None

    def _link_that_works(self, node: str) -> PrefillLink | None:
        """The link with a prefill node, if it is up and the node has not failed again and again."""
        link = self._legs.link_to(node)
        if link is None or not self._breakers.allows(node, self._clock.now_s()):
            return None
        return link

    def _on_failures(self, news: list[LegNews]) -> None:
        """News that may speak against the prefill node."""
        for item in news:
            if isinstance(item, Failed):
                node = item.leg.link.node
                self._breakers.failed(node, item.kind, item.message, self._clock.now_s())
        self._on_news(news)

    def _on_news(self, news: list[LegNews]) -> None:
        for item in news:
            match item:
                case Arrived(leg=leg):
                    self._breakers.arrived(leg.link.node)
                    if leg.has_first_tokens:
                        self._join(leg)
                case Failed(leg=leg, kind=kind, message=message):
                    self._metrics.handoff_failed(kind)
                    self._breakers.released(leg.link.node)  # where it was not blamed
                    self._go_on(leg, kind, message)

    def _join(self, leg: Leg) -> None:
        """KV and first tokens are here: the sequence decodes."""
        leg.state.timing.transferred(self._clock.now_s())
        leg.state.count_transfer(leg.num_bytes, leg.link.peer.transport)
        self._legs.done(leg)
        self._scheduler.join(leg.sequence)

    def _go_on(self, leg: Leg, kind: str, message: str) -> None:
        """After a failure: the sequence's next life takes the next stop of the route."""
        if leg.sequence.over:
            return
        told = {"request_id": leg.handoff.request_id, "attempt": leg.handoff.attempt}
        logger.warning("%s: %s on %s: %s", leg.handoff, kind, leg.link.node, message, extra=told)
        leg.state.last_failure = message
        new = self._scheduler.start_again(leg.sequence)
        leg.state.live(*new, from_the_start=False)
        self._legs.drop(leg.sequence)
