"""What a rank is made of, as its process sees it: a runner of batches and a KV endpoint."""

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from kv_transfer.commands import KvCommand, KvEvent
from pdserve.core.kv_layout import KvLayout
from pdserve.engine.batch import Batch, StepOutput


class PendingStep(Protocol):
    """A step that was launched."""

    def wait(self) -> StepOutput:
        """What it sampled. Called once, in the order of the launches, maybe from another thread."""


class Runner(Protocol):
    """Runs batches in the order they are launched."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def num_blocks(self) -> int: ...

    def launch(self, batch: Batch) -> PendingStep: ...

    def warm_up(self) -> None:
        """Run what the first request would else pay for."""


class Endpoint(Protocol):
    """Moves KV of this rank. ``handle`` returns at once; what comes of it appears in ``events``."""

    @property
    def address(self) -> str: ...

    @property
    def events(self) -> SimpleQueue[KvEvent]: ...

    def handle(self, command: KvCommand) -> None: ...


@dataclass(frozen=True, slots=True)
class RankParts:
    """One rank's runner and endpoint."""

    runner: Runner
    endpoint: Endpoint
