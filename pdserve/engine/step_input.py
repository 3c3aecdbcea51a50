"""What the device is told of one step: its chunks as one row of numbers, sent in one copy.

Block tables and the tokens sampled last lie there already (``slots.py``); positions and the like
follow from these numbers on the device. A step may be filled up to the size of a CUDA graph: the
tokens that are too many are a chunk of the spare slot, the chunks that are too many are empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.batch import Carried, Chunk, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How many of each a step has, or has room for."""

    num_tokens: int  # T
    num_chunks: int  # S; as many as tokens: each chunk is one token
    num_new_blocks: int  # P

    @property
    def sizes(self) -> list[int]:
        """Of the parts of ``StepInput``, in their order."""
        return [self.num_tokens, *[self.num_chunks] * 4, *[self.num_new_blocks] * 2]

    @property
    def num_values(self) -> int:
        """All parts, each on a border of 16 bytes: Triton compiles for other borders once more."""
        return sum(map(_even, self.sizes))

    @property
    def has_single_tokens(self) -> bool:
        """True if every chunk is one token."""
        return self.num_tokens == self.num_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlocks:
    """Entries of the block tables that a step brings."""

    places: list[int]  # in all tables, row by row
    blocks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The numbers by name: int64, views of one tensor."""

    tokens: Tensor  # [T] token ids; -1 - slot stands for the token sampled last for that slot
    slots: Tensor  # [S]
    starts: Tensor  # [S] position of each chunk's first token
    ends: Tensor  # [S] where each chunk ends among the step's tokens
    keep_in: Tensor  # [S] the slot that keeps what is sampled after the chunk; the spare: nobody
    places: Tensor  # [P] as in NewBlocks
    blocks: Tensor  # [P]

    @classmethod
    def named(cls, values: Tensor, shape: StepShape) -> "StepInput":
        """``values`` are what ``pack`` gives for this shape."""
        sizes = shape.sizes
        parts = torch.split(values, list(map(_even, sizes)))
        tokens, slots, starts, ends, keep_in, places, blocks = (
            part[:size] for part, size in zip(parts, sizes, strict=True)
        )
        return cls(
            tokens=tokens,
            slots=slots,
            starts=starts,
            ends=ends,
            keep_in=keep_in,
            places=places,
            blocks=blocks,
        )

    def firsts(self) -> Tensor:
        """``[S]``: where each chunk begins among the step's tokens."""
        return torch.cat((self.ends.new_zeros(1), self.ends[:-1]))

    def lengths(self) -> Tensor:
        """``[S]``: tokens of each chunk."""
        return self.ends - self.firsts()

    def owners(self) -> Tensor:
        """``[T]``: which chunk a token belongs to."""
        return torch.searchsorted(self.ends, _numbers(self.tokens), right=True)

    def positions(self, owners: Tensor) -> Tensor:
        """``[T]``: the tokens' positions in their sequences."""
        return _numbers(self.tokens) + (self.starts - self.firsts())[owners]


def shape_of(chunks: Sequence[Chunk], new: NewBlocks) -> StepShape:
    """The shape of a step that is not filled up."""
    return StepShape(
        num_tokens=sum(chunk.length for chunk in chunks),
        num_chunks=len(chunks),
        num_new_blocks=len(new.places),
    )


def pack(
    chunks: Sequence[Chunk],
    new: NewBlocks,
    shape: StepShape,
    *,
    spare: Slot,
    spare_entry: NewBlocks,
) -> list[int]:
    """The numbers of ``StepInput``, filled up to ``shape``.

    ``spare_entry`` is one entry that may be written as often as there is room. A step with fewer
    tokens than ``shape`` has fewer chunks too.
    """
    tokens: list[int] = []
    ends: list[int] = []
    for chunk in chunks:
        if isinstance(chunk.tokens, Carried):
            tokens.append(-1 - chunk.slot)
        else:
            tokens.extend(chunk.tokens)
        ends.append(len(tokens))
    more_tokens = shape.num_tokens - len(tokens)
    more_chunks = shape.num_chunks - len(chunks)
    more_blocks = shape.num_new_blocks - len(new.places)
    assert min(more_tokens, more_chunks, more_blocks) >= 0
    assert more_chunks or not more_tokens
    if shape.has_single_tokens:
        more_ends = list(range(len(tokens) + 1, shape.num_tokens + 1))
    else:
        more_ends = [shape.num_tokens] * more_chunks
    parts = (
        [*tokens, *[0] * more_tokens],
        [*[chunk.slot for chunk in chunks], *[spare] * more_chunks],
        [*[chunk.start for chunk in chunks], *[0] * more_chunks],
        [*ends, *more_ends],
        [*[chunk.slot if chunk.num_samples else spare for chunk in chunks], *[spare] * more_chunks],
        [*new.places, *spare_entry.places * more_blocks],
        [*new.blocks, *spare_entry.blocks * more_blocks],
    )
    values: list[int] = []
    for part in parts:
        values += part
        values += [0] * (len(part) % 2)
    return values


def _even(count: int) -> int:
    return count + count % 2


def _numbers(tokens: Tensor) -> Tensor:
    return torch.arange(len(tokens), device=tokens.device)
