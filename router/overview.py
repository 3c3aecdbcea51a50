"""What the nodes' views add up to: is the router ready, what fits, and the status that is shown.

Pure functions of the views.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.core.breaker import BreakerState
from pdserve.core.node import NodeStanding, Role
from pdserve.core.request import RouteTaken
from router.nodes import DRAINING, NodeView

Json = dict[str, object]

_NUMBERS = (
    "total_blocks",
    "free_blocks",
    "draining_blocks",
    "block_size",
    "running",
    "waiting",
    "queued_prefill_tokens",
    "num_preemptions",
    "kv_bytes_moved",
    "prefix_cache_queries",
    "prefix_cache_hits",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """``ready`` with a ``reason`` is degraded: it serves, but not as it was meant to."""

    ready: bool
    reason: str | None

    @property
    def word(self) -> str:
        if not self.ready:
            return "not ready"
        return "degraded" if self.reason else "ready"


def max_model_len(views: Iterable[NodeView], own_bound: int) -> int:
    """What every decode node heard of can hold; before any was, what the model allows."""
    told = [
        view.max_model_len
        for view in views
        if view.role is Role.DECODE and view.max_model_len is not None
    ]
    return min([own_bound, *told])


def readiness(views: Sequence[NodeView], *, prefill_configured: bool, had_pair: bool) -> Readiness:
    """Ready once a decode node and, where the cluster has any, a prefill node connected to it are;
    after there was such a pair for the first time (``had_pair``, before an earlier router of
    this cluster or this one), its absence only degrades.
    """
    decode = [view for view in views if view.role is Role.DECODE]
    if not any(view.ready for view in decode):
        return Readiness(ready=False, reason=_why_not(decode, Role.DECODE))
    problem = _prefill_problem(views) if prefill_configured else None
    return Readiness(ready=problem is None or had_pair, reason=problem)


def status(
    views: Iterable[NodeView],
    standings: Iterable[NodeStanding] = (),
    *,
    routes: Mapping[RouteTaken, int],
    readiness: Readiness,
    num_requests: int,
) -> Json:
    """What ``/admin/status`` answers. ``standings``: of nodes that do not run, too."""
    nodes = [_node(view) for view in views]
    shown = {view["name"] for view in nodes}
    absent = [_absent(standing) for standing in standings if standing.name not in shown]
    return {
        "state": readiness.word,
        "reason": readiness.reason,
        "requests": num_requests,
        "nodes": sorted([*nodes, *absent], key=_place),
        "routes": {route.value: routes[route] for route in RouteTaken},
    }


def _prefill_problem(views: Sequence[NodeView]) -> str | None:
    prefill = [view for view in views if view.role is Role.PREFILL]
    ready = {view.name for view in prefill if view.ready}
    if not ready:
        return _why_not(prefill, Role.PREFILL)
    connected = {
        name
        for view in views
        if view.role is Role.DECODE and view.ready and view.state is not None
        for name in view.state.connected_prefill_nodes
    }
    if not ready & connected:
        return "no decode node is connected to a prefill node"
    return None


def _why_not(views: Sequence[NodeView], role: Role) -> str:
    reasons = "; ".join(f"{view.name}: {view.reason}" for view in views)
    return f"no {role} node is ready" + (f" ({reasons})" if reasons else "")


def _state_word(view: NodeView) -> str:
    if view.barred == DRAINING:
        return DRAINING
    return "ready" if view.ready else "not ready"


def _place(node: Json) -> tuple[bool, int, str]:
    """Prefill nodes first, each role by number."""
    name = str(node["name"])
    return node["role"] == Role.DECODE.value, len(name), name


def _absent(standing: NodeStanding) -> Json:
    """A node that is being made, in the shape of one that runs."""
    unknown = dict.fromkeys(("address", "incarnation", "max_model_len", *_NUMBERS))
    return {
        "name": standing.name,
        "role": standing.role.value,
        "state": standing.standing.value,
        "connected": False,
        "ready": False,
        "reason": standing.reason,
        "ranks": [],
        "breaker": BreakerState.CLOSED.value,
        "troubles": [],
        **unknown,
    }


def _node(view: NodeView) -> Json:
    state = view.state
    return {
        "name": view.name,
        "role": view.role.value,
        "state": _state_word(view),
        "address": view.address.address,
        "incarnation": view.address.incarnation,
        "connected": view.session is not None,
        "ready": view.ready,
        "reason": view.reason,
        "ranks": [{"rank": r.rank, "pid": r.pid, "host": r.host} for r in view.ranks],
        "breaker": view.breaker.value,
        "troubles": [
            {"node": t.node, "stage": t.stage.value, "state": t.state.value, "reason": t.reason}
            for t in (state.troubles if state else ())
        ],
        "max_model_len": view.max_model_len,
        "total_blocks": state and state.total_blocks,
        "free_blocks": state and state.free_blocks,
        "draining_blocks": state and state.draining_blocks,
        "block_size": state and state.block_size,
        "running": state and state.running,
        "waiting": state and state.waiting,
        "queued_prefill_tokens": state and state.queued_prefill_tokens,
        "num_preemptions": state and state.num_preemptions,
        "kv_bytes_moved": state and state.kv_bytes_moved,
        "prefix_cache_queries": state and state.prefix_cache_queries,
        "prefix_cache_hits": state and state.prefix_cache_hits,
    }
