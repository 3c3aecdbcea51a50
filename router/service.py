"""What both public faces, HTTP and gRPC, stand on: one object with everything of this router.

Composes; decides nothing itself.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

from pdserve.core.api_keys import ApiKey
from pdserve.core.clock import Clock
from pdserve.core.cluster_access import ClusterAccess
from pdserve.core.config import RouterConfig
from pdserve.core.model_spec import ModelSpec
from pdserve.core.node import NodeAddress, Role
from pdserve.core.security_config import SecurityConfig
from pdserve.text.tokenizer import Tokenizer
from router.callers import Caller, Callers
from router.channel import Channels
from router.dispatch import Dispatcher
from router.generation import Generation, GenerationRequest, generate
from router.grammar_checks import GrammarChecks
from router.intake import Intake
from router.metrics import Metrics
from router.orders import Orders
from router.overview import Json, Readiness, max_model_len, readiness, status
from router.roster import Roster
from router.routing import Ask, Routed, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Everything a router is told when it starts."""

    config: RouterConfig
    served_name: str
    model_dir: Path  # for its tokenizer and chat template
    model: ModelSpec
    dtype: str
    max_model_len: int | None  # the cluster file's bound on prompt and output of one request
    headroom_tokens: int  # output tokens that decode nodes reserve blocks for before a prefill
    prefill_configured: bool  # False: decode nodes prefill everything, and that is as it should be
    was_ready: bool = False  # this cluster, by an earlier router of it
    admin_token: str | None = field(
        default=None, repr=False
    )  # who has it may give orders; None: nobody may
    security: SecurityConfig = field(default_factory=SecurityConfig)
    api_keys: tuple[ApiKey, ...] | None = None  # beside those of the file; neither: none is asked
    access: ClusterAccess | None = None  # to the nodes; None: theirs is open
    caching: frozenset[Role] = frozenset(Role)  # pools that keep KV of prompts for later ones
    nodes: tuple[NodeAddress, ...] = ()  # more come by Router.set_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The running parts of a router."""

    spec: RouterSpec
    created_s: int  # Unix time
    clock: Clock
    tokenizer: Tokenizer
    intake: Intake
    grammar_checks: GrammarChecks
    channels: Channels
    roster: Roster
    orders: Orders
    routing: Routing
    dispatcher: Dispatcher
    metrics: Metrics
    callers: Callers

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        label: str,
        authorization: str | None,
        arrived_s: float,
        traceparent: str | None = None,
    ) -> AbstractContextManager[Generation]:
        """See ``router.generation.generate``. ``authorization``: what the client said it is.

        Raises UnauthenticatedError where that is nobody.
        """
        caller = self.callers.caller(authorization)
        return generate(
            self.dispatcher,
            self.tokenizer,
            [_salted(request, caller) for request in requests],
            label=label,
            tenant=caller.tenant,
            arrived_s=arrived_s,
            traceparent=traceparent,
        )

    def abort(self, request_id: str, *, authorization: str | None) -> bool:
        """End one of the caller's requests; False where none of that name runs."""
        owner = self.callers.caller(authorization).owner
        return self.dispatcher.abort(request_id, owner=owner)

    def max_model_len(self) -> int:
        """Prompt and output tokens that one request may have."""
        own_bound = self.spec.max_model_len or self.spec.model.max_position
        return max_model_len(self.channels.views(), own_bound)

    def route(self, ask: Ask) -> Routed:
        """Where a request would go now; nothing is placed. Raises NoNodeError."""
        return self.routing.ask(ask, self.channels.views())

    def readiness(self) -> Readiness:
        if self.dispatcher.closing:
            return Readiness(ready=False, reason="the router is shutting down")
        return readiness(
            self.channels.views(),
            prefill_configured=self.spec.prefill_configured,
            had_pair=self.spec.was_ready or self.channels.had_pair(),
        )

    def status(self) -> Json:
        """What ``/admin/status`` answers."""
        nodes = status(
            self.channels.views(),
            self.roster.standings,
            routes=self.metrics.routes,
            readiness=self.readiness(),
            num_requests=self.dispatcher.num_running,
        )
        queues = [asdict(queue) for queue in self.dispatcher.queues().queues]
        return {"model": self.spec.served_name, "version": version(), **nodes, "queues": queues}


def _salted(request: GenerationRequest, caller: Caller) -> GenerationRequest:
    job = request.job
    return replace(request, job=replace(job, cache_salt=caller.salt(job.cache_salt)))


def version() -> str:
    """The installed pdserve's version."""
    return metadata.version("pdserve")
