"""The ranks of one TP group for ``pdserve bench engine``: a process each, which end together."""

import multiprocessing as mp
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch

from pdserve.core.environment import set_up_gpu_rank
from pdserve.engine.parallel import TpGroup, start_tp_group

MEETING_S = 120.0  # for the ranks to find each other

Work = Callable[[TpGroup], None]


def run_ranks(work: Work, *, size: int, device: torch.device) -> int:
    """Do ``work`` on every rank; the exit status. Where one fails the others are ended.

    On GPUs the ranks take as many as they are, from ``device`` on.
    """
    spawn = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        store = Path(directory) / "tp"
        ranks = [
            spawn.Process(target=_rank, args=(work, rank, size, device, store))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        try:
            running = list(ranks)
            while running:
                wait([rank.sentinel for rank in running])
                ended = [rank for rank in running if rank.exitcode is not None]
                if any(rank.exitcode for rank in ended):
                    return 1
                running = [rank for rank in running if rank not in ended]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return 0


def _rank(work: Work, rank: int, size: int, device: torch.device, store: Path) -> None:
    if device.type == "cuda":
        set_up_gpu_rank()
    group = start_tp_group(
        store_path=store,
        tp_rank=rank,
        tp_size=size,
        device=rank_device(device, rank),
        timeout_s=MEETING_S,
    )
    try:
        work(group)
    finally:
        group.close()


def rank_device(device: torch.device, rank: int) -> torch.device:
    """The device of a rank where rank 0 is on ``device``."""
    if device.type == "cpu":
        return device
    return torch.device(device.type, (device.index or 0) + rank)
