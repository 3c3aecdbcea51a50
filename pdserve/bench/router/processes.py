"""The processes that are measured: a fake node and one router, each pinned to a core.

The router's is started as ``pdserve serve`` starts it, in a loop of its own, without Ray around it.
"""

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from pdserve.bench.router.fake_node import run_fake_node
from pdserve.bench.termination import ignoring_interrupts, interrupted_by_sigterm
from pdserve.cluster.own_loop import OwnLoop
from pdserve.cluster.readiness import wait_until_ready
from pdserve.core.config import LimitsConfig, RouterConfig
from pdserve.core.environment import set_up_front
from pdserve.core.errors import InternalError
from pdserve.core.model_spec import read_model_spec
from pdserve.core.node import NodeAddress
from router.server import start_router
from router.service import RouterSpec

START_S, END_S = 60.0, 10.0
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What runs. ``step_s``: the pause between two steps of the node; 0: none."""

    model_dir: Path
    token_id: int
    step_s: float
    router_core: int | None  # None: not pinned
    other_core: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Where to find them."""

    node: NodeAddress
    http_address: str
    router_pid: int

    def router_cpu_s(self) -> float:
        """CPU seconds of the router's process since its start."""
        fields = Path(f"/proc/{self.router_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def router_rss_mib(self) -> float:
        """Memory of the router's process."""
        pages = int(Path(f"/proc/{self.router_pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE


@contextmanager
def running(setup: Setup) -> Iterator[Running]:
    """Both processes; ended on leaving. Raises InternalError where one does not start."""
    with interrupted_by_sigterm(), contextlib.ExitStack() as stack:
        node, _ = stack.enter_context(
            _process(run_fake_node, (setup.token_id, setup.step_s), setup.other_core)
        )
        assert isinstance(node, NodeAddress)
        http_address, pid = stack.enter_context(
            _process(_run_router, (setup.model_dir, node), setup.router_core)
        )
        assert isinstance(http_address, str)
        yield Running(node=node, http_address=http_address, router_pid=pid)


def pin(core: int | None) -> None:
    """This process and its threads run on the core from now on."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def _run_router(connection: Connection, model_dir: Path, node: NodeAddress) -> None:
    spec = RouterSpec(
        config=RouterConfig(
            http_port=0, grpc_port=0, limits=LimitsConfig(max_queued_requests=1 << 16)
        ),
        served_name="bench",
        model_dir=model_dir,
        model=read_model_spec(model_dir),
        dtype="float32",
        max_model_len=None,
        headroom_tokens=64,
        prefill_configured=False,
        nodes=(node,),
    )
    loop = OwnLoop("router")
    router = loop.run(start_router(spec))
    loop.run(wait_until_ready(router.grpc_address, START_S))
    gc.collect()
    gc.freeze()  # as ``pdserve serve`` does
    connection.send(router.http_address)
    with contextlib.suppress(EOFError):
        connection.recv()
    loop.run(router.close(0.0))


@contextmanager
def _process(
    target: Callable[..., None], arguments: tuple[object, ...], core: int | None
) -> Iterator[tuple[object, int]]:
    """A process and the first thing that it says."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(
        target=_pinned, args=(core, target, theirs, *arguments), daemon=True, name=target.__name__
    )
    with ignoring_interrupts():
        process.start()
    theirs.close()
    try:
        if not ours.poll(START_S):
            raise InternalError(f"{process.name} did not start within {START_S:g} s")
        try:
            said = ours.recv()
        except EOFError as error:
            raise InternalError(f"{process.name} ended at its start") from error
        assert process.pid is not None
        yield said, process.pid
    finally:
        ours.close()
        process.join(END_S)
        if process.is_alive():
            process.kill()
            process.join()


def _pinned(core: int | None, target: Callable[..., None], *arguments: object) -> None:
    pin(core)
    set_up_front()  # likewise
    target(*arguments)
