"""The nodes that there are to be: what each is meant to be, what runs of it, and how it stands.

A record, written by the supervisor alone.
"""

from collections.abc import Iterable

from pdserve.cluster.launcher import RunningNode
from pdserve.cluster.resolve import NodePlan
from pdserve.cluster.scaling import number_of
from pdserve.core.node import NodeStanding, Role, Standing


class Members:
    """By node name."""

    def __init__(self, plans: Iterable[NodePlan]) -> None:
        self.plans = {plan.name: plan for plan in plans}
        self.running: dict[str, RunningNode] = {}
        self.absent: dict[str, tuple[Standing, str]] = {}  # why one does not run, if it ever did
        self.draining: set[str] = set()
        self.switching: set[str] = set()  # to the role of their plan

    @property
    def standings(self) -> tuple[NodeStanding, ...]:
        """All of them, prefill nodes first."""
        return tuple(sorted(map(self.standing, self.plans), key=_place))

    @property
    def decoding(self) -> list[RunningNode]:
        """The decode nodes that run, and can be told something."""
        return [
            node
            for name, node in self.running.items()
            if node.address.role is Role.DECODE and name not in self.switching
        ]

    def standing(self, name: str) -> NodeStanding:
        """How one stands. Until a change of role is made, it is what it was."""
        role = self.plans[name].role
        if (node := self.running.get(name)) is None:
            standing, reason = self.absent.get(name, (Standing.STARTING, None))
            return NodeStanding(name=name, role=role, standing=standing, reason=reason)
        if name in self.switching:
            return NodeStanding(name=name, role=role, standing=Standing.SWITCHING)
        standing = Standing.DRAINING if name in self.draining else Standing.SERVING
        return NodeStanding(
            name=name, role=node.address.role, standing=standing, address=node.address
        )

    def forget(self, name: str) -> None:
        """It is not to be any more."""
        del self.plans[name]
        self.draining.discard(name)
        self.absent.pop(name, None)


def _place(node: NodeStanding) -> tuple[bool, int, str]:
    """Each role by number."""
    return node.role is Role.DECODE, number_of(node.name), node.name
