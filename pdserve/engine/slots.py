"""What a rank remembers between steps for each slot: block table, last sampled token, choices.

The front sends deltas; this is what they add up to. A batch is checked whole before anything
changes, so that a wrong one fails alone. Tables and last tokens are on the device, everything else
on the host. One slot more, the spare one, belongs to nobody: it is for what fills a step up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId
from pdserve.engine.batch import Batch, Chunk, Slot
from pdserve.engine.staging import on_device
from pdserve.engine.step_input import NewBlocks


class Slots:
    """The state of ``num_slots`` slots whose sequences have at most ``max_len`` tokens.

    Every entry of the spare slot's table is ``spare_block``.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        spare_block: BlockId,
        block_size: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        self.spare = Slot(num_slots)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_len = max_len
        self._width = -(-max_len // block_size)
        self._device = device
        self._tables = torch.zeros(num_slots + 1, self._width, dtype=torch.int32, device=device)
        self._tables[self.spare] = spare_block
        self._held = [0] * num_slots  # blocks in each table
        self._choices: list[tuple[int, ...] | None] = [None] * num_slots  # None: nobody joined
        self._last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.spare_entry = NewBlocks(places=[self.spare * self._width], blocks=[spare_block])

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
            slot, new_blocks = chunk.slot, chunk.new_blocks
            num_blocks = held[slot] if slot in held else self._held_by(slot)
            if num_blocks is None:
                raise RankError(f"step {batch.step}: no sequence is in slot {slot}")
            if new_blocks:
                self._check_blocks(batch, new_blocks)
                held[slot] = num_blocks = num_blocks + len(new_blocks)
            length = chunk.length
            end = chunk.start + length
            if length < 1 or end > num_blocks * self._block_size or end > self._max_len:
                raise self._no_room(batch, chunk, num_blocks)

    def apply(self, batch: Batch) -> NewBlocks:
        """Take over the batch's delta, but for the entries that are still to be written into the
        tables, which are returned. ``check`` has passed.
        """
        for slot in batch.left:
            self._choices[slot] = None
            self._held[slot] = 0
        new = NewBlocks(places=[], blocks=[])
        for joined in batch.joined:
            self._choices[joined.slot] = joined.choices
            self._held[joined.slot] = 0
            self._append(joined.slot, joined.blocks, new)
        for chunk in batch.chunks:
            if chunk.new_blocks:
                self._append(chunk.slot, chunk.new_blocks, new)
        return new

    def write(self, places: Tensor, blocks: Tensor) -> None:
        """Write these entries (int64 ``[P]``) into the tables."""
        self._tables.view(-1)[places] = blocks.int()

    def write_now(self, new: NewBlocks) -> None:
        """As ``write``, from the host."""
        if new.places:
            self.write(self._tensor(new.places), self._tensor(new.blocks))

    def tables(self, slots: Tensor, num_blocks: int | None = None) -> Tensor:
        """Block tables ``[S, M]`` int32 of these slots (int64 ``[S]``): whole, or cut off."""
        return self._tables[:, :num_blocks].index_select(0, slots)

    def num_held(self, slots: Sequence[Slot]) -> int:
        """The blocks of the longest table of these slots."""
        return max(self._held[slot] for slot in slots)

    def choices(self, slot: Slot) -> tuple[int, ...]:
        """The choices of the slot's sequence."""
        choices = self._choices[slot]
        assert choices is not None
        return choices

    def token_ids(self, tokens: Tensor) -> Tensor:
        """Token ids ``[T]`` of ``StepInput.tokens``."""
        return torch.where(tokens < 0, self._last_tokens[(-1 - tokens).clamp(min=0)], tokens)

    def keep_last_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """Remember ``tokens`` ``[S]`` for the chunks of the next step that say ``Carried``."""
        self._last_tokens[slots] = tokens

    def _append(self, slot: Slot, blocks: Sequence[BlockId], new: NewBlocks) -> None:
        first = slot * self._width + self._held[slot]
        new.places.extend(range(first, first + len(blocks)))
        new.blocks.extend(blocks)
        self._held[slot] += len(blocks)

    def _held_by(self, slot: Slot) -> int | None:
        known = 0 <= slot < len(self._held) and self._choices[slot] is not None
        return self._held[slot] if known else None

    def _check_blocks(self, batch: Batch, blocks: Sequence[BlockId]) -> None:
        if blocks and not (min(blocks) >= 0 and max(blocks) < self._num_blocks):
            raise RankError(
                f"step {batch.step}: a block is not one of {self._num_blocks}: {blocks}"
            )

    def _no_room(self, batch: Batch, chunk: Chunk, num_blocks: int) -> RankError:
        return RankError(
            f"step {batch.step}: slot {chunk.slot} has {num_blocks} blocks of "
            f"{self._block_size} tokens and holds at most {self._max_len} "
            f"tokens: no room for {chunk.length} tokens at {chunk.start}"
        )

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return on_device(values, dtype, self._device)
