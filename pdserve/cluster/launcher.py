"""Nodes and the router as the supervisor sees them: started, watched, told, ended.

Ray is one way to run them (``ray_launcher.py``); tests have another.
"""

from typing import Protocol

from pdserve.cluster.resolve import NodePlan
from pdserve.core.errors import PdserveError
from pdserve.core.node import NodeAddress, NodeStanding
from pdserve.core.orders import OrderAnswer, PlacedOrder


class Running(Protocol):
    """A node or the router, in processes of its own."""

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        """How all nodes stand. Raises PdserveError where it has died meanwhile."""

    async def ended(self) -> PdserveError:
        """Wait until any of its processes ended or failed; say why."""

    async def close(self, grace_s: float) -> None:
        """End it in order: what it holds may finish for ``grace_s`` seconds. Never raises."""

    async def kill(self) -> None:
        """End all its processes now, whatever they do. Never raises; may be called again."""


class RunningNode(Running, Protocol):
    """The processes of a node, and the incarnation that they are now."""

    @property
    def address(self) -> NodeAddress: ...

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence that it can hold, in either role."""

    async def switch(self, plan: NodePlan) -> None:
        """Go on with the same ranks as another incarnation, of the plan's role.

        What it holds may finish. Raises PdserveError where that fails; it is to be killed then.
        """

    async def until_idle(self) -> None:
        """Wait until it holds nothing. Raises PdserveError where it dies before."""


class RunningRouter(Running, Protocol):
    """The router, by which orders come. Both raise PdserveError where it dies."""

    async def next_order(self) -> PlacedOrder:
        """Wait for the next order."""

    async def answer(self, answer: OrderAnswer) -> None:
        """Tell who placed an order what has begun."""


class Launcher(Protocol):
    """Starts processes. A start that fails raises a PdserveError and leaves nothing running."""

    async def start_node(self, plan: NodePlan) -> RunningNode: ...

    async def start_router(self, *, was_ready: bool) -> RunningRouter:
        """``was_ready``: the cluster has been ready once; what lacks now only degrades it."""
