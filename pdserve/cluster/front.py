"""What a front process holds, as its actor sees it: a node or the router."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from pdserve.cluster.resolve import NodePlan
from pdserve.core.errors import PdserveError
from pdserve.core.node import NodeAddress, NodeStanding
from pdserve.core.orders import OrderAnswer, PlacedOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAddress:
    """Where the router listens, each ``host:port``."""

    http: str
    grpc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node that serves: where, and the tokens of a sequence that it can hold."""

    address: NodeAddress
    max_model_len: int


class Front(Protocol):
    """Made by one of the entries of ``pdserve.cluster``'s table, in the loop that it lives in."""

    @property
    def facts(self) -> NodeFacts | RouterAddress: ...

    @property
    def failed(self) -> Awaitable[PdserveError]:
        """Done, with the error as its result, when it cannot go on."""

    async def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        """How the cluster's nodes stand from now on; whoever has an address is there."""

    async def close(self, grace_s: float) -> None: ...


class NodeSide(Front, Protocol):
    """A node."""

    async def until_idle(self) -> None:
        """Wait until it holds nothing."""

    async def switch(self, incarnation_id: str, plan: NodePlan) -> None:
        """Be another incarnation, of the plan's role, with the same ranks; ``facts`` are new."""


class RouterSide(Front, Protocol):
    """The router."""

    async def next_order(self) -> PlacedOrder:
        """Wait for an operator's order."""

    async def answer(self, answer: OrderAnswer) -> None:
        """To an order of ``next_order``."""
