"""The Ray actors: thin shells around what knows nothing of Ray.

What a shell runs is loaded by name, inside its process: a front never imports torch, the command
line neither. Errors cross as ``Failure``.

    RankActor    ``run`` blocks the main thread until the rank ends
    FrontActor   methods run in threads; the node or router lives in a loop of its own
"""

import asyncio
import gc
import logging
import os
from typing import cast

import ray

from pdserve.cluster import ENTRIES
from pdserve.cluster.front import Front, NodeFacts, NodeSide, RouterAddress, RouterSide
from pdserve.cluster.incarnation import Incarnation
from pdserve.cluster.outcome import Failure, failure_of
from pdserve.cluster.own_loop import OwnLoop
from pdserve.cluster.process_log import log_to_file
from pdserve.cluster.resolve import NodePlan
from pdserve.core.environment import set_up_front
from pdserve.core.node import NodeStanding
from pdserve.core.orders import OrderAnswer, PlacedOrder
from pdserve.core.plugin import load_plugin
from pdserve.core.starvation import ProcessId, own_process

logger = logging.getLogger(__name__)

CALL_THREADS = 8  # of a FrontActor: some of its calls wait as long as it lives


class RankActor:
    """One rank process."""

    def __init__(self, log_folder: str, name: str, log_format: str) -> None:
        log_to_file(log_folder, name, log_format)

    def pid(self) -> int:
        return os.getpid()

    def run(self, incarnation: Incarnation, rank: int) -> Failure | None:
        """Be this rank until its front stops it or is gone."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        try:
            load_plugin(ENTRIES["rank"])(incarnation, rank, int(gpus[0]) if gpus else None)
        except Exception as error:  # the outermost function of a process
            logger.exception("the rank failed")
            return failure_of(error)
        return None


class FrontActor:
    """The front of a node, or the router. ``start`` comes first, the others after its answer."""

    def __init__(self, log_folder: str, name: str, log_format: str) -> None:
        log_to_file(log_folder, name, log_format)
        set_up_front()
        self._name = name
        self._loop = OwnLoop(name)
        self._front: Front | None = None

    def process_id(self) -> ProcessId:
        return own_process()

    def start(self, entry: str, order: object) -> NodeFacts | RouterAddress | Failure:
        """Start what ``entry`` names with what it wants to be told."""
        try:
            self._front = self._loop.run(load_plugin(ENTRIES[entry])(order))
        except Exception as error:  # the outermost function of a process
            logger.exception("%s could not start", self._name)
            return failure_of(error)
        gc.collect()
        gc.freeze()  # what is here now lives as long as the process: no later collection walks it
        return self._started.facts

    def set_nodes(self, nodes: tuple[NodeStanding, ...]) -> None:
        self._loop.run(self._started.set_nodes(nodes))

    def until_idle(self) -> None:
        """Of a node's front."""
        self._loop.run(cast(NodeSide, self._started).until_idle())

    def switch(self, incarnation_id: str, plan: NodePlan) -> NodeFacts | RouterAddress | Failure:
        """Of a node's front: be another incarnation, with the same ranks."""
        try:
            self._loop.run(cast(NodeSide, self._started).switch(incarnation_id, plan))
        except Exception as error:  # the outermost function of a process
            logger.exception("%s could not become %s", self._name, incarnation_id)
            return failure_of(error)
        return self._started.facts

    def next_order(self) -> PlacedOrder:
        """Of the router's front."""
        return self._loop.run(cast(RouterSide, self._started).next_order())

    def answer(self, answer: OrderAnswer) -> None:
        """Of the router's front."""
        self._loop.run(cast(RouterSide, self._started).answer(answer))

    def alive(self) -> None:
        """Answer as soon as the loop of what lives here turns."""
        self._loop.run(_turn())

    def ended(self) -> Failure:
        """Wait until it cannot go on."""
        return self._loop.run(_failure(self._started))

    def close(self, grace_s: float) -> None:
        self._loop.run(self._started.close(grace_s))

    @property
    def _started(self) -> Front:
        assert self._front is not None, "start comes first"
        return self._front


async def _turn() -> None:
    await asyncio.sleep(0)


async def _failure(front: Front) -> Failure:
    error = await front.failed
    return failure_of(error)
