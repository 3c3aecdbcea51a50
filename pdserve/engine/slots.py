"""What a rank remembers between steps for each slot: block table, last sampled token, choices.

The front sends deltas; this is what they add up to. A batch is checked whole before anything
changes, so that a wrong one fails alone. The tables are on the device, everything else on the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId
from pdserve.engine.batch import Batch, Chunk, Slot
from pdserve.engine.staging import on_device


class Slots:
    """The state of ``num_slots`` slots whose sequences have at most ``max_len`` tokens."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_len = max_len
        self._width = -(-max_len // block_size)
        self._device = device
        self._tables = torch.zeros(num_slots, self._width, dtype=torch.int32, device=device)
        self._held = [0] * num_slots  # blocks in each table
        self._choices: list[tuple[int, ...] | None] = [None] * num_slots  # None: nobody joined
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def check(self, batch: Batch) -> None:
        """Raise RankError where the batch does not fit what is here; changes nothing."""
        held: dict[Slot, int | None] = {}
        for slot in batch.left:
            if self._held_by(slot) is None or slot in held:
                raise RankError(f"step {batch.step}: no sequence is in slot {slot} to leave it")
            held[slot] = None
        for joined in batch.joined:
            slot = joined.slot
            if not 0 <= slot < len(self._held) or held.get(slot, self._held_by(slot)) is not None:
                raise RankError(f"step {batch.step}: slot {slot} is taken or not a slot")
            self._check_blocks(batch, joined.blocks)
            held[slot] = len(joined.blocks)
        for chunk in batch.chunks:
            self._check_blocks(batch, chunk.new_blocks)
            before = held.get(chunk.slot, self._held_by(chunk.slot))
            if before is None:
                raise RankError(f"step {batch.step}: no sequence is in slot {chunk.slot}")
            held[chunk.slot] = after = before + len(chunk.new_blocks)
            self._check_room(batch, chunk, after)

    def apply(self, batch: Batch) -> None:
        """Take over the batch's delta; ``check`` has passed."""
        for slot in batch.left:
            self._choices[slot] = None
            self._held[slot] = 0
        places: list[int] = []
        blocks: list[int] = []
        for joined in batch.joined:
            self._choices[joined.slot] = joined.choices
            self._held[joined.slot] = 0
            self._append(joined.slot, joined.blocks, places, blocks)
        for chunk in batch.chunks:
            self._append(chunk.slot, chunk.new_blocks, places, blocks)
        if places:
            self._tables.view(-1)[self._tensor(places)] = self._tensor(blocks, torch.int32)

    def tables(self, slots: Sequence[Slot]) -> Tensor:
        """Block tables ``[S, M]`` int32 of these slots, as wide as the longest of them."""
        width = max(self._held[slot] for slot in slots)
        return self._tables[self._tensor(slots), :width]

    def choices(self, slot: Slot) -> tuple[int, ...]:
        """The choices of the slot's sequence."""
        choices = self._choices[slot]
        assert choices is not None
        return choices

    def last_tokens(self, slots: Sequence[Slot]) -> Tensor:
        """The tokens ``[S]`` int64 that were sampled last for these slots."""
        return self._last_tokens[self._tensor(slots)]

    def keep_last_tokens(self, slots: Sequence[Slot], tokens: Tensor) -> None:
        """Remember ``tokens`` ``[S]`` for the chunks of the next step that say ``Carried``."""
        self._last_tokens[self._tensor(slots)] = tokens

    def _append(
        self, slot: Slot, new: Sequence[BlockId], places: list[int], blocks: list[int]
    ) -> None:
        first = slot * self._width + self._held[slot]
        places.extend(range(first, first + len(new)))
        blocks.extend(new)
        self._held[slot] += len(new)

    def _held_by(self, slot: Slot) -> int | None:
        known = 0 <= slot < len(self._held) and self._choices[slot] is not None
        return self._held[slot] if known else None

    def _check_blocks(self, batch: Batch, blocks: Sequence[BlockId]) -> None:
        if blocks and not (min(blocks) >= 0 and max(blocks) < self._num_blocks):
            raise RankError(
                f"step {batch.step}: a block is not one of {self._num_blocks}: {blocks}"
            )

    def _check_room(self, batch: Batch, chunk: Chunk, num_blocks: int) -> None:
        end = chunk.start + chunk.length
        if chunk.length < 1 or end > min(num_blocks * self._block_size, self._max_len):
            raise RankError(
                f"step {batch.step}: slot {chunk.slot} has {num_blocks} blocks of "
                f"{self._block_size} tokens and holds at most {self._max_len} "
                f"tokens: no room for {chunk.length} tokens at {chunk.start}"
            )

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return on_device(values, dtype, self._device)
