"""The tensor-parallel group over peer memory: sums and gathers that a CUDA graph may hold.

A sum of few bytes travels word by word, each with its number beside it; a larger one in pieces that
a flag follows: each rank sends all of it to each other rank and adds what it gets (one shot). Where
that would send more than need be, each rank adds its part of all, then the sums are gathered (two
shots). The plain sum in the order of the ranks is the oracle.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.peer_memory import PeerMemory
from pdserve.engine.peer_triton import exchange, sum_small

HOPPER = 9
PAIR = 2
ALIGNMENT = 16  # bytes that a thread moves at once
SMALL_WARPS = 4
FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How messages are cut. All ranks take the same. Measured on two H200s."""

    small_words: int = 1024  # of 4 bytes, that a program of a small sum sends
    small_programs: int = 128
    small_bytes: int = 512 << 10  # as many as they hold; larger sums go in pieces
    piece_bytes: int = 32 << 10
    programs: int = 128  # at most one for each processor: a program waits for its peers
    slots: int = 4
    ahead: int = 1
    warps: int = 8
    two_shots_bytes: int = 1 << 20  # from here on, and where there are more ranks than two

    def areas(self, size: int) -> list[int]:
        """Bytes of small words, pieces and flags that a rank of ``size`` keeps for its peers."""
        peers = size - 1
        return [
            self.small_programs * 2 * peers * self.small_words * 8,
            self.programs * self.slots * peers * self.piece_bytes,
            self.programs * peers * 4,
        ]


class PeerTpGroup:
    """Ranks in processes of one host, on GPUs that reach each other's memory."""

    runs_in_graphs = True

    def __init__(
        self,
        store: Any,  # noqa: ANN401
        *,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        tuning: Tuning | None = None,
    ) -> None:
        """Raises RuntimeError where the GPUs cannot reach each other's memory."""
        self.rank = rank
        self.size = size
        self._tuning = tuning or Tuning()
        sizes = self._tuning.areas(size)
        self._memory = PeerMemory(
            store, name=name, rank=rank, size=size, num_bytes=sum(sizes), device=device
        )
        parts = zip(*(torch.split(own, sizes) for own in self._memory.of_ranks), strict=True)
        small, self._pieces, flags = (tuple(part) for part in parts)  # each of all ranks
        self._small = tuple(area.view(torch.int64) for area in small)
        self._flags = tuple(area.view(torch.int32) for area in flags)
        self._small_counters = torch.zeros(
            self._tuning.small_programs, dtype=torch.int32, device=device
        )
        self._counters = torch.zeros(self._tuning.programs, dtype=torch.int32, device=device)
        self._overlaps = torch.cuda.get_device_capability(device)[0] >= HOPPER

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        num_bytes = x.numel() * x.itemsize
        if num_bytes <= self._tuning.small_bytes and num_bytes % ALIGNMENT == 0:
            self._sum_small(x)
        elif self._pays_in_two_shots(num_bytes):
            self._sum_in_two_shots(x)
        else:
            self._exchange("sum", x, x.view(1, -1))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        num_rows, width = x.shape
        out = x.new_empty(num_rows, self.size * width)
        self._exchange("gather", out, x.contiguous())
        return out

    def close(self) -> None:
        self._memory.close()

    def _sum_small(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        words = x.view(-1).view(torch.int32)
        sum_small[(triton.cdiv(words.numel(), self._tuning.small_words),)](
            words,
            words,
            self._small,
            self._small_counters,
            words.numel() // 4,
            RANK=self.rank,
            SIZE=self.size,
            BLOCK=self._tuning.small_words,
            FLOAT=FLOATS[x.dtype],
            OVERLAPS=self._overlaps,
            num_warps=SMALL_WARPS,
            launch_pdl=self._overlaps,
        )

    def _pays_in_two_shots(self, num_bytes: int) -> bool:
        """Between two ranks one shot sends as many bytes."""
        return (
            self.size > PAIR
            and num_bytes >= self._tuning.two_shots_bytes
            and num_bytes % (self.size * ALIGNMENT) == 0
        )

    def _sum_in_two_shots(self, x: Tensor) -> None:
        width = x.numel() // self.size
        own = x.new_empty(1, width)
        self._exchange("scatter", own, x.view(self.size, width))
        self._exchange("gather", x, own)

    def _exchange(self, mode: str, out: Tensor, x: Tensor) -> None:
        tuning = self._tuning
        assert max(out.numel(), x.numel()) < 1 << 31  # a column is an int32
        num_rows, width = x.shape
        if mode == "scatter":
            num_rows = 1
        block = tuning.piece_bytes // x.itemsize
        num_programs = min(tuning.programs, num_rows * triton.cdiv(width, block))
        if num_programs == 0:
            return
        exchange[(num_programs,)](
            out,
            x,
            tuple(area.view(x.dtype) for area in self._pieces),
            self._flags,
            self._counters,
            num_rows,
            width,
            RANK=self.rank,
            SIZE=self.size,
            BLOCK=block,
            SLOTS=tuning.slots,
            AHEAD=tuning.ahead,
            MODE=mode,
            OVERLAPS=self._overlaps,
            num_warps=tuning.warps,
            num_stages=1,
            launch_pdl=self._overlaps,
        )
