"""What the router knows of one node, and the news that come from its session."""

from dataclasses import dataclass, field

from pdserve.core.breaker import BreakerState, Trouble
from pdserve.core.cost import NodeCosts
from pdserve.core.errors import NodeLostError
from pdserve.core.node import NodeAddress, Role
from pdserve.core.request import PromptOutput, RequestFailure, RequestKey, TokenOutput
from pdserve.core.timeline import Timeline

DRAINING = "draining"  # why nothing new is sent there


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where one rank process of a node runs."""

    rank: int
    pid: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What a node said of itself last; its numbers are at most about a second old."""

    ready: bool
    reason: str | None  # why not ready
    total_blocks: int
    free_blocks: int
    block_size: int
    running: int
    waiting: int
    waiting_for_blocks: int
    draining_blocks: int
    queued_prefill_tokens: int
    num_preemptions: int
    kv_bytes_moved: int
    connected_prefill_nodes: tuple[str, ...]
    troubles: tuple[Trouble, ...] = ()  # a decode node's with its prefill nodes
    prefix_cache_queries: int = 0  # prompt tokens that were looked for in its prefix cache
    prefix_cache_hits: int = 0  # and found
    context_tokens: int = 0  # of what decodes there
    prefill_chunk: int = 0  # prompt tokens of one step
    costs: NodeCosts = field(default_factory=NodeCosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node as the router sees it now."""

    address: NodeAddress
    session: int | None  # names the live session; None: not connected
    max_model_len: int | None  # None: it never answered
    ranks: tuple[RankPlace, ...]
    state: NodeState | None  # of the live session
    was_paired: bool  # at some time it was ready and, a decode node, connected to a prefill node
    problem: str | None  # why it is not connected
    barred: str | None = None  # why nothing new is sent there, connected or not
    breaker: BreakerState = BreakerState.CLOSED
    transport: str | None = None  # what carries its KV; None: it has not said

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def role(self) -> Role:
        return self.address.role

    @property
    def ready(self) -> bool:
        """It takes new work."""
        is_open = self.session is not None and self.state is not None and self.state.ready
        return is_open and self.barred is None

    @property
    def reason(self) -> str | None:
        """Why the node is not ready; None: it is."""
        if self.session is None:
            return self.problem or "connecting"
        if self.state is None:
            return "has not told its state yet"
        if self.state.ready and self.barred is not None:
            return self.barred
        return None if self.state.ready else self.state.reason or "not ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """What one step of a decode node gave to this router."""

    node: str
    timelines: tuple[tuple[RequestKey, Timeline], ...]
    outputs: tuple[TokenOutput, ...]
    failures: tuple[RequestFailure, ...]
    prompts: tuple[PromptOutput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNews:
    """A node told its state (or was connected); its view is new."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNews:
    """A session is over; nothing more comes from it."""

    node: str
    session: int
    error: NodeLostError


News = StepNews | StateNews | LostNews
