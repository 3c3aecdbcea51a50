"""A rank's work between its front's first word and its last.

    main thread   steps ring ──> runner.launch ──> queue of launched steps
    outputs       queue ──> wait ──> out-ring (rank 0; the others only wait)
    kv-commands   kv ring ──> endpoint.handle
    kv-events     endpoint.events ──> out-ring
    pulse         every second ──> out-ring: a long step is no death, a stopped process is
    front-watch   ends the rank when the front is gone

Launching never waits for an output, so as many steps run ahead as the front has submitted. The
first error of any thread is told to the front, which ends the node. Knows neither engine nor
transports.
"""

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import cast

from kv_transfer.commands import EndpointFailed, KvCommand, KvEvent
from pdserve.core.errors import InternalError, RankError, RingClosedError
from pdserve.engine.batch import Batch
from pdserve.rank.front_watch import FrontWatch
from pdserve.rank.lifeline import wait_for_front
from pdserve.rank.messages import Pulse, RankReady, Stop
from pdserve.rank.parts import Endpoint, PendingStep, RankParts, Runner
from pdserve.rank.reports import Reports
from pdserve.rank.ring import RingReader, RingWriter
from pdserve.rank.run_dir import RunDir
from pdserve.rank.wire import decode

PULSE_S = 1.0

logger = logging.getLogger(__name__)


def serve_rank(
    files: RunDir,
    rank: int,
    open_parts: Callable[[], AbstractContextManager[RankParts]],
    *,
    start_timeout_s: float,
    report_timeout_s: float,
) -> None:
    """Be ``rank`` until the front says stop or is gone. Errors are told to the front and raised.

    ``open_parts`` builds the rank's parts and takes them down; it runs once the front is there.
    """
    with ExitStack() as stack:
        lifeline = stack.enter_context(
            closing(wait_for_front(files.lifeline(rank), timeout_s=start_timeout_s))
        )
        writer = RingWriter(files.out(rank))
        reports = stack.enter_context(closing(Reports(writer, rank, timeout_s=report_timeout_s)))
        steps = stack.enter_context(closing(RingReader(files.steps, rank)))
        kv = stack.enter_context(closing(RingReader(files.kv, rank)))
        stack.enter_context(FrontWatch(lifeline, (steps.interrupt, kv.interrupt)))
        try:
            with open_parts() as parts:
                _get_ready(parts, rank, reports)
                with _threads(parts, kv, rank, reports) as launched:
                    _launch_steps(steps, parts.runner, launched)
        except RingClosedError:
            logger.warning("rank %d: the front is gone", rank)
        except Exception as error:
            reports.fail(error)
            raise


def _get_ready(parts: RankParts, rank: int, reports: Reports) -> None:
    parts.runner.warm_up()
    gc.collect()
    gc.freeze()  # what was made so far lives as long as the process: no later collection walks it
    reports.send(
        RankReady(
            rank=rank,
            pid=os.getpid(),
            num_blocks=parts.runner.num_blocks,
            layout=parts.runner.layout,
            address=parts.endpoint.address,
        )
    )


def _launch_steps(
    steps: RingReader, runner: Runner, launched: SimpleQueue[PendingStep | None]
) -> None:
    while True:
        message = decode(steps.read(timeout_s=None) or b"")
        if isinstance(message, Stop):
            return
        if not isinstance(message, Batch):
            raise RankError(f"{type(message).__name__} in the ring of steps")
        launched.put(runner.launch(message))


@contextmanager
def _threads(
    parts: RankParts, kv: RingReader, rank: int, reports: Reports
) -> Iterator[SimpleQueue[PendingStep | None]]:
    """Run the other threads; yields the queue of launched steps. They are done at the end."""
    launched: SimpleQueue[PendingStep | None] = SimpleQueue()
    events = cast("SimpleQueue[KvEvent | None]", parts.endpoint.events)
    over = threading.Event()
    work: dict[str, Callable[[], None]] = {
        "outputs": partial(_report_outputs, launched, reports if rank == 0 else None),
        "kv-commands": partial(_handle_commands, kv, parts.endpoint),
        "kv-events": partial(_report_events, events, reports),
        "pulse": partial(_report_pulse, over, reports),
    }
    threads = [
        threading.Thread(target=_run, args=(function, reports), name=name, daemon=True)
        for name, function in work.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield launched
    except Exception as error:
        if not isinstance(error, RingClosedError):
            reports.fail(error)  # before the threads are waited for: a step may be stuck
        raise
    finally:
        launched.put(None)
        kv.interrupt()
        events.put(None)
        over.set()
        for thread in threads:
            thread.join()


def _run(function: Callable[[], None], reports: Reports) -> None:
    try:
        function()
    except RingClosedError:
        pass  # the front is gone; the main thread has seen it too
    except Exception as error:
        reports.fail(error)


def _report_outputs(launched: SimpleQueue[PendingStep | None], reports: Reports | None) -> None:
    while (step := launched.get()) is not None:
        output = step.wait()
        if reports is not None:
            reports.send(output)


def _handle_commands(kv: RingReader, endpoint: Endpoint) -> None:
    while True:
        message = decode(kv.read(timeout_s=None) or b"")
        if isinstance(message, Stop):
            return
        if not isinstance(message, KvCommand):
            raise RankError(f"{type(message).__name__} in the ring of KV commands")
        endpoint.handle(message)


def _report_events(events: SimpleQueue[KvEvent | None], reports: Reports) -> None:
    while (event := events.get()) is not None:
        if isinstance(event, EndpointFailed):
            raise InternalError(event.reason)
        reports.send(event)


def _report_pulse(over: threading.Event, reports: Reports) -> None:
    while not over.wait(PULSE_S):
        reports.send(Pulse())
