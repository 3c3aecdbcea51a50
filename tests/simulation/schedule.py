"""Everything that decides how one simulation goes, as data: cluster, requests, faults, delays.

``SCHEDULES`` draws one; hypothesis shrinks one that fails. The same schedule always gives the same
run, so the printed one is all that is needed to see it again.
"""

from dataclasses import dataclass
from enum import StrEnum

from hypothesis import strategies as st

from pdserve.core.routing_config import POLICY_NAMES


class Kind(StrEnum):
    """What goes wrong; the gentle ones first, so that a failure shrinks towards them."""

    DRAIN = "drain"  # a node gets nothing new for a while
    HOLD = "hold"  # what two processes say to each other comes late
    CUT_SESSION = "cut session"  # a connection between two processes breaks
    FAIL_HANDOFF = "fail handoff"  # of those that move now, one fails, at one end
    CUT_KV = "cut KV"  # the KV links between two nodes break
    FLAP = "flap"  # a connection breaks again and again, for a while
    BAD_LINKS = "bad links"  # whatever handoff a prefill node begins fails, for a while
    STOP = "stop"  # a node's front says nothing for a while
    RESTART = "restart"  # a node is closed in order and started again
    LOSE_RANKS = "lose ranks"  # a node's ranks die
    KILL = "kill"  # a node dies
    STOP_ROUTER = "stop router"
    KILL_ROUTER = "kill router"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``node`` and ``other`` pick among what there is then; ``lasts_s``: where it has an end."""

    kind: Kind
    at_s: float
    node: int
    other: int
    lasts_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One call of a client."""

    at_s: float
    router: int
    prompt_len: int
    max_tokens: int
    num_prompts: int = 1
    num_choices: int = 1
    min_tokens: int = 0
    ends: bool = False  # some tokens end it, beside the model's own
    stop: str | None = None
    num_alike: int = 0  # first tokens of the prompt that others have too
    salt: bytes = b""
    priority: int = 0
    tenant: int = 0
    leaves_s: float | None = None  # its client goes away so long after it came


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes, what they are made of and how requests are let in and routed."""

    num_prefill: int = 1
    num_decode: int = 1
    num_routers: int = 1
    depth: int = 1
    decode_blocks: int = 24
    prefill_blocks: int = 24
    decode_block_size: int = 4
    prefill_block_size: int = 4
    decode_tp: int = 1
    prefill_tp: int = 1
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    local_prefill_tokens: int = 8
    fallback_chunk: int = 8
    headroom_tokens: int = 4
    prefill_chunk: int = 16
    caching: bool = True
    policy: str = "length"
    local_prefill_below: int = 0
    conditional: bool = False
    kv_watermark: float = 0.95
    max_sent_ahead: int = 4
    max_queued: int | None = None  # of the one class
    queue_timeout_s: float | None = None
    max_prefill_wait_s: float | None = None
    request_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    cluster: Cluster
    wishes: tuple[Wish, ...]
    faults: tuple[Fault, ...] = ()
    longest_s: float = 0.01  # that anything is on its way, a step included
    seed: int = 0  # of the delays


# Sixteenths are exact: a printed schedule is the schedule, and things may come at one time.
_TIMES = st.integers(0, 48).map(lambda n: n / 16)

_FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(Kind),
    at_s=_TIMES,
    node=st.integers(0, 5),
    other=st.integers(0, 5),
    lasts_s=st.sampled_from([0.25, 1.0, 2.5, 4.0, 8.0, 16.0]),
)

_WISHES = st.builds(
    Wish,
    at_s=_TIMES,
    router=st.integers(0, 1),
    prompt_len=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    num_prompts=st.sampled_from([1, 1, 1, 1, 3]),
    num_choices=st.sampled_from([1, 1, 1, 2, 3]),
    min_tokens=st.sampled_from([0, 0, 2]),
    ends=st.booleans(),
    stop=st.sampled_from([None, None, None, "a", "b"]),
    num_alike=st.sampled_from([0, 0, 9, 24]),
    salt=st.sampled_from([b"", b"", b"", b"other"]),
    priority=st.sampled_from([0, 0, 1]),
    tenant=st.integers(0, 1),
    leaves_s=st.sampled_from([None, None, None, None, 0.0, 0.3, 1.5, 5.0]),
)

_CLUSTERS = st.builds(
    Cluster,
    num_prefill=st.integers(0, 3),
    num_decode=st.integers(1, 3),
    num_routers=st.integers(1, 2),
    depth=st.integers(1, 2),
    decode_blocks=st.integers(8, 48),
    prefill_blocks=st.integers(8, 48),
    decode_block_size=st.sampled_from([4, 4, 2, 6]),
    prefill_block_size=st.sampled_from([4, 4, 3, 8]),
    decode_tp=st.sampled_from([1, 1, 1, 2]),
    prefill_tp=st.sampled_from([1, 1, 1, 2]),
    max_num_seqs=st.integers(2, 6),
    max_num_batched_tokens=st.integers(2, 24),
    local_prefill_tokens=st.integers(0, 8),
    fallback_chunk=st.integers(1, 8),
    headroom_tokens=st.integers(0, 9),
    prefill_chunk=st.integers(2, 24),
    caching=st.booleans(),
    policy=st.sampled_from(POLICY_NAMES),
    local_prefill_below=st.sampled_from([0, 0, 12]),
    conditional=st.booleans(),
    kv_watermark=st.sampled_from([0.95, 0.5]),
    max_sent_ahead=st.sampled_from([4, 0, 1]),
    max_queued=st.sampled_from([None, None, 2]),
    queue_timeout_s=st.sampled_from([None, None, 2.0, 0.25]),
    max_prefill_wait_s=st.sampled_from([None, None, 0.5]),
    request_timeout_s=st.sampled_from([None, None, 3.0, 0.5]),
)

SCHEDULES = st.builds(
    Schedule,
    cluster=_CLUSTERS,
    wishes=st.lists(_WISHES, min_size=1, max_size=8).map(tuple),
    faults=st.lists(_FAULTS, max_size=5).map(tuple),
    longest_s=st.sampled_from([0.02, 0.001, 0.1, 0.3]),
    seed=st.integers(0, 1 << 16),
)
