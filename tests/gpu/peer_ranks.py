"""Ranks in processes of their own that sum and gather what they are told to, on one or two GPUs."""

import datetime
import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdserve.core.environment import set_up_gpu_rank
from pdserve.core.plugin import load_plugin
from pdserve.engine.parallel import TpGroup

MEETING_S = 60
ANSWER_S = 120
_DIST: Any = dist  # torch's own stubs leave out what its backends can do


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation on tensors that are drawn from ``seed`` and the rank."""

    kind: str  # "sum", "gather", "graph": sums in a graph that is replayed
    shape: tuple[int, int]
    dtype: torch.dtype
    seed: int

    def parts(self, size: int, replay: int = 0) -> list[Tensor]:
        """What the ranks put in, on the CPU."""
        parts = []
        for rank in range(size):
            draw = torch.Generator().manual_seed((self.seed * 10 + replay) * size + rank)
            parts.append((torch.randn(self.shape, generator=draw) * 8).to(self.dtype))
        return parts


class PeerRanks:
    """A group, as the process that has started its ranks sees it."""

    def __init__(self, processes: list[Any], pipes: list[Connection]) -> None:
        self.processes = processes
        self.pipes = pipes

    def __call__(self, case: Case) -> list[list[Tensor]]:
        """What each rank got, once for every replay."""
        for pipe in self.pipes:
            pipe.send(case)
        return [self.answer(rank) for rank in range(len(self.pipes))]

    def answer(self, rank: int) -> list[Tensor]:
        assert self.pipes[rank].poll(ANSWER_S), f"rank {rank} does not answer"
        found: list[Tensor] = self.pipes[rank].recv()
        return found


@contextmanager
def peer_ranks(store: Path, size: int, num_gpus: int) -> Iterator[PeerRanks]:
    spawn = mp.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(size)]
    processes = [
        spawn.Process(target=_rank, args=(str(store), rank, size, rank % num_gpus, ends[rank][1]))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in ends:
        theirs.close()
    try:
        yield PeerRanks(processes, [ours for ours, _ in ends])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(store: str, rank: int, size: int, gpu: int, pipe: Connection) -> None:
    set_up_gpu_rank()
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    torch.set_num_threads(1)
    file_store = _DIST.FileStore(store, size)
    file_store.set_timeout(datetime.timedelta(seconds=MEETING_S))
    start = load_plugin("pdserve.engine.peer_group:PeerTpGroup")  # needs Triton
    group = start(file_store, name="test", rank=rank, size=size, device=device)
    while True:
        case: Case = pipe.recv()
        pipe.send([result.cpu() for result in _results(group, case, device)])


def _results(group: TpGroup, case: Case, device: torch.device) -> Iterator[Tensor]:
    own = case.parts(group.size)[group.rank].to(device)
    if case.kind == "gather":
        yield group.all_gather(own)
        return
    yield group.all_reduce(own.clone())
    if case.kind == "graph":
        x = own.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            group.all_reduce(x)
        for replay in range(1, 4):
            x.copy_(case.parts(group.size, replay)[group.rank])
            graph.replay()
            yield x.clone()
