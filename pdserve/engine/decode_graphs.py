"""Decode steps as CUDA graphs: captured once for each size of a batch, replayed with other inputs.

A decode step launches hundreds of small kernels, and launching takes the host longer than running
takes the GPU; a replay is one launch. A batch runs in the next larger captured size, its first row
repeated: the repeats write the same KV to the same places. Owns the inputs that the graphs read.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

# Token ids [S], positions [S], block tables [S, M] → hidden states [S, hidden].
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class DecodeGraphs:
    """Graphs of ``forward`` for up to ``max_num_seqs`` sequences of ``max_num_blocks`` blocks."""

    def __init__(
        self, forward: Forward, *, max_num_seqs: int, max_num_blocks: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._sizes = graph_sizes(max_num_seqs)
        self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        shape = (max_num_seqs, max_num_blocks)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __contains__(self, num_seqs: int) -> bool:
        """True if there is a graph for so many sequences."""
        return bool(self._graphs) and num_seqs <= self._sizes[-1]

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first: they share its memory.

        Runs ``forward`` on zeros: at position 0 of block 0, which must be nobody's.
        """
        memory = None
        for size in reversed(self._sizes):
            self._run(size)  # compiles and loads what a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads of a rank may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                hidden = self._run(size)
            memory = graph.pool()
            self._graphs[size] = graph, hidden

    def run(self, token_ids: Tensor, positions: Tensor, block_tables: Tensor) -> Tensor:
        """Hidden states ``[S, hidden]`` of one token of each sequence, until the next run."""
        num_seqs, width = block_tables.shape
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        for held, given in (
            (self._token_ids, token_ids),
            (self._positions, positions),
            (self._tables[:, :width], block_tables),
        ):
            held[:num_seqs] = given
            held[num_seqs:size] = given[0]
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden[:num_seqs]

    def _run(self, size: int) -> Tensor:
        return self._forward(self._token_ids[:size], self._positions[:size], self._tables[:size])


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: dense where a row more costs most, at most an eighth apart above 64."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)}
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})
