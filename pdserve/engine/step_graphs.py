"""Small steps as CUDA graphs: captured once for each of some sizes, replayed with other inputs.

A step launches hundreds of small kernels, and up to some 1,000 tokens, of small models more,
launching takes the host longer than running takes the GPU; a replay is one launch. A step runs in
the smallest captured shape that holds it, filled up with tokens of the spare slot. Owns what the
graphs read and write.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.staging import integers_on_host
from pdserve.engine.step_input import StepInput, StepShape

# Tokens of steps that have longer chunks than one token, as far as graphs are worth it.
CHUNK_TOKENS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Launching a layer takes some 0.6 ms, in which an H200 multiplies so many weights and tokens.
LAUNCHED_PRODUCTS = 2e11
FEW_CHUNKS, SOME_CHUNKS = 2, 17  # in them; a third size holds as many as there may be, but
MOST_OF_ALL = 256  # flash-attn works with more in another way, which takes longer for few
LARGE = 1024  # tokens, above which few chunks take as long as some
USUAL_BLOCK = 16  # tokens; what does not fit, of smaller blocks, is written before the graph

Forward = Callable[[StepInput, StepShape], Tensor]  # logits [S, V] after each chunk


class End(Protocol):
    """What comes after the logits."""

    def __call__(
        self, step: StepInput, shape: StepShape, logits: Tensor, tokens: Tensor, kept: Tensor
    ) -> None:
        """Into ``tokens`` ``[S]`` those that follow ``logits`` ``[S, V]``, which go to ``kept``."""


class Replayable(Protocol):
    """A captured graph, as it is used here."""

    def replay(self) -> None:
        """Queue all of it on the current stream."""


class StepGraphs:
    """Graphs of ``forward`` for these shapes, each with the ``end`` of a step."""

    def __init__(
        self,
        forward: Forward,
        end: End,
        shapes: Sequence[StepShape],
        *,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._end = end
        self._shapes = sorted(shapes, key=_size)
        self._decode_sizes = [s.num_tokens for s in self._shapes if s.has_single_tokens]
        most_values = max(shape.num_values for shape in shapes)
        most_chunks = max(shape.num_chunks for shape in shapes)
        self._values = torch.zeros(most_values, dtype=torch.int64, device=device)
        self._logits = torch.zeros(most_chunks, vocab_size, dtype=dtype, device=device)
        self._tokens = torch.zeros(most_chunks, dtype=torch.int64, device=device)
        self._graphs: dict[StepShape, Replayable] = {}

    def shape_for(self, step: StepShape) -> StepShape | None:
        """The captured shape that holds such a step; None: there is none."""
        if not self._graphs:
            return None
        if step.has_single_tokens and step.num_chunks <= self._decode_sizes[-1]:
            size = self._decode_sizes[bisect_left(self._decode_sizes, step.num_chunks)]
            return decode_shape(size)
        return next((shape for shape in self._shapes if _holds(shape, step)), None)

    @torch.inference_mode()
    def capture(self, values_of: Callable[[StepShape], Sequence[int]]) -> None:
        """Capture all shapes, the largest first: the others share its memory.

        ``values_of`` gives the input of a step that is nothing but filling.
        """
        memory = None
        for shape in reversed(self._shapes):
            self._send(values_of(shape), shape)
            self._run(shape)  # compiles and loads what a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads of a rank may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                self._run(shape)
            memory = graph.pool()
            self._graphs[shape] = graph

    def run(self, values: Sequence[int], shape: StepShape) -> tuple[Tensor, Tensor]:
        """Logits ``[S, V]`` after each chunk and the tokens ``[S]`` of its end, until the next run.

        ``values`` are those of ``step_input.pack`` for a captured shape.
        """
        self._send(values, shape)
        self._graphs[shape].replay()
        return self._logits[: shape.num_chunks], self._tokens[: shape.num_chunks]

    def _send(self, values: Sequence[int], shape: StepShape) -> None:
        staged = integers_on_host(values, self._values.device)
        self._values[: shape.num_values].copy_(staged, non_blocking=True)

    def _run(self, shape: StepShape) -> None:
        step = StepInput.named(self._values[: shape.num_values], shape)
        logits = self._forward(step, shape)
        num_chunks = shape.num_chunks
        self._end(step, shape, logits, self._tokens[:num_chunks], self._logits[:num_chunks])


def decode_shapes(max_num_seqs: int) -> list[StepShape]:
    """Steps of one token each of up to so many sequences."""
    return [decode_shape(size) for size in decode_sizes(max_num_seqs)]


def chunk_shapes(max_num_seqs: int, most_tokens: int, layer_weights: float) -> list[StepShape]:
    """Steps with longer chunks, of at most ``most_tokens`` in all, of a model with so many weights
    in a rank's part of a layer.

    What fills a step up is a sequence too: ``most_tokens`` may not be more than one can have.
    """
    shapes = []
    for num_tokens in chunk_sizes(most_tokens, layer_weights):
        most = min(max_num_seqs + 1, num_tokens - 1, MOST_OF_ALL)
        counts = {min(SOME_CHUNKS, most), most}
        if num_tokens <= LARGE:
            counts.add(min(FEW_CHUNKS, most))
        shapes += [_chunk_shape(num_tokens, count) for count in sorted(counts)]
    return shapes


def chunk_sizes(most_tokens: int, layer_weights: float) -> list[int]:
    """Ascending, up to the first from which on running takes longer than launching."""
    worth = LAUNCHED_PRODUCTS / layer_weights
    sizes = [size for size in CHUNK_TOKENS if size < most_tokens]
    if most_tokens > 1:
        sizes.append(most_tokens)
    below = [size for size in sizes if size < worth]
    return sizes[: len(below) + 1]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: dense where a row more costs most, at most an eighth apart above 64."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)}
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def decode_shape(num_seqs: int) -> StepShape:
    """One token each of so many sequences, which mostly need no more than a block each."""
    return StepShape(num_tokens=num_seqs, num_chunks=num_seqs, num_new_blocks=num_seqs)


def _chunk_shape(num_tokens: int, num_chunks: int) -> StepShape:
    num_blocks = num_chunks + num_tokens // USUAL_BLOCK  # of prompts that begin and end here
    return StepShape(num_tokens=num_tokens, num_chunks=num_chunks, num_new_blocks=num_blocks)


def _holds(shape: StepShape, step: StepShape) -> bool:
    """True if the step fits with a chunk to spare, which takes the tokens that are too many."""
    return (
        not shape.has_single_tokens
        and step.num_tokens <= shape.num_tokens
        and step.num_chunks < shape.num_chunks
    )


def _size(shape: StepShape) -> tuple[int, int]:
    return shape.num_tokens, shape.num_chunks
