"""A rank process with a fake runner that misbehaves on demand.

    python -m tests.rank.rank_child RUN_DIR RANK MISBEHAVIOUR

Step 3 is where a launch goes wrong (``raise``, ``die``, ``hang``). ``fail-start`` and ``die-start``
happen instead of getting ready, ``silent`` never gets ready, ``garbage`` does and sends noise.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_transfer.commands import CancelSend, EndpointFailed, KvCommand
from pdserve.core.errors import ModelFilesError, RankError
from pdserve.engine.batch import Batch
from pdserve.rank.lifeline import wait_for_front
from pdserve.rank.messages import RankReady
from pdserve.rank.parts import RankParts
from pdserve.rank.ring import RingReader, RingWriter
from pdserve.rank.run_dir import RunDir
from pdserve.rank.service import serve_rank
from pdserve.rank.wire import encode
from tests.fakes import TINY_LAYOUT, FakeEndpoint, FakeRunner

BAD_STEP = 3
FOREVER = threading.Event()


class ChildEndpoint(FakeEndpoint):
    """Fails when told to cancel a handoff named "bad"; ends, when it is named "over"."""

    def handle(self, command: KvCommand) -> None:
        if isinstance(command, CancelSend) and command.handoff.request_id == "bad":
            raise RankError("an endpoint's own fault")
        if isinstance(command, CancelSend) and command.handoff.request_id == "over":
            self.events.put(EndpointFailed(reason="its thread is over"))
            return
        super().handle(command)


def misbehave(kind: str) -> None:
    match kind:
        case "raise":
            raise ValueError("no such step")
        case "fail-start":
            raise ModelFilesError("model.safetensors: damaged")
        case "die" | "die-start":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang" | "silent":
            FOREVER.wait()


@contextmanager
def open_parts(rank: int, kind: str) -> Iterator[RankParts]:
    if kind in ("fail-start", "die-start", "silent"):
        misbehave(kind)

    def on_launch(batch: Batch) -> None:
        if batch.step == BAD_STEP:
            misbehave(kind)

    endpoint = ChildEndpoint(f"127.0.0.1:{rank}")
    yield RankParts(FakeRunner(num_blocks=64 - rank, on_launch=on_launch), endpoint)
    endpoint.close()


def send_garbage(files: RunDir, rank: int) -> None:
    wait_for_front(files.lifeline(rank), timeout_s=20)
    readers = [RingReader(files.steps, rank), RingReader(files.kv, rank)]
    out = RingWriter(files.out(rank))
    ready = RankReady(
        rank=rank, pid=os.getpid(), num_blocks=64, layout=TINY_LAYOUT, address="127.0.0.1:1"
    )
    out.write(encode(ready), timeout_s=1)
    assert readers[0].read(timeout_s=20)
    out.write(b"noise", timeout_s=1)
    FOREVER.wait()


def main(run_dir: Path, rank: int, kind: str) -> None:
    logging.basicConfig(level=logging.INFO)
    files = RunDir(run_dir)
    if kind == "garbage":
        send_garbage(files, rank)
    serve_rank(files, rank, lambda: open_parts(rank, kind), start_timeout_s=20, report_timeout_s=5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
