"""Who holds which blocks and slots on one node, and the deltas that tell the ranks.

Both schedulers decide with it; it is the only place where blocks are freed. A released sequence
keeps its blocks until every step in flight that touches it has retired and no handoff reads or
writes them.

With a prefix cache a new sequence begins with the blocks that hold the longest known beginning of
its prompt. A block is named, so that others find it, when the step that filled it has retired or
all of its handoff is in; what was only planned, or came in part, never is. Named blocks are not
written again: a sequence writes beyond the blocks that it was given, and a fork copies the block
that it goes on in.
"""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Run
from dataclasses import dataclass

from pdserve.core.kv_layout import BlockId
from pdserve.core.prefix_hash import extend_hashes
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot, TokenMask
from pdserve.engine.block_copies import BlockCopies, ends_of
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sequence import Sequence

CARRIED = Carried()


@dataclass(slots=True)
class _InFlight:
    step: int
    sequences: list[Sequence]  # one for each chunk
    copied: list[BlockId]  # ends of copies: kept until the step retires


class Ledger:
    """Blocks and slots of one node. ``num_slots`` sequences can be resident on the ranks.

    ``num_queried_tokens`` counts the prompt tokens of all sequences that began with a prefix cache,
    ``num_hit_tokens`` those whose KV was found.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, num_slots: int, enable_prefix_caching: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._free_slots = [Slot(i) for i in reversed(range(num_slots))]
        self._untold: set[Slot] = set()  # whose sequences the ranks do not know yet
        self._left: list[Slot] = []
        self._copies = BlockCopies(self.pool)
        self._in_flight: deque[_InFlight] = deque()
        self._next_step = 0
        self.num_draining_blocks = 0

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def is_empty(self) -> bool:
        """True if no block has an owner."""
        return self.pool.num_free == self.pool.num_blocks

    @property
    def max_tokens(self) -> int:
        """Tokens of one sequence that alone would fill the cache."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def begin(self, sequence: Sequence, num_tokens: int, *, spare: int = 0) -> bool:
        """Give a new sequence what is cached of its prompt, and blocks for ``num_tokens`` in all.

        False, and nothing changed, if fewer than ``spare`` blocks would be left free.
        """
        assert not sequence.blocks
        cached = self._cached(sequence)
        num_new = self.num_blocks_for(num_tokens) - len(cached)
        num_idle = sum(map(self.pool.cache.is_idle, cached))
        if num_new + num_idle + spare > self.pool.num_free:
            return False
        self.pool.share(cached)
        sequence.blocks = cached + self.pool.allocate(num_new)
        sequence.num_named = len(cached)
        sequence.num_cached = sequence.num_planned = len(cached) * self.block_size
        if self._caches(sequence):
            self.num_queried_tokens += sequence.num_prompt
            self.num_hit_tokens += sequence.num_cached
        return True

    def has_room(self, sequence: Sequence) -> bool:
        """True if its blocks hold one more position than is planned."""
        return sequence.num_planned < len(sequence.blocks) * self.block_size

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for ``num_tokens`` tokens in all.

        False, and nothing changed, if too few are free.
        """
        assert not sequence.over
        missing = self.num_blocks_for(num_tokens) - len(sequence.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back blocks beyond ``num_tokens`` tokens, which no step or handoff has touched."""
        assert num_tokens >= sequence.num_planned
        kept = self.num_blocks_for(num_tokens)
        self.pool.free(sequence.blocks[kept:])
        del sequence.blocks[kept:]

    def enter(self, sequence: Sequence) -> None:
        """Give the sequence a slot; the batch with its first chunk tells the ranks."""
        assert sequence.slot is None
        sequence.slot = self._free_slots.pop()
        self._untold.add(sequence.slot)

    def leave(self, sequence: Sequence) -> None:
        """Take the slot back; its next holder may join in the same batch."""
        if sequence.slot is None:
            return
        if sequence.slot in self._untold:
            self._untold.remove(sequence.slot)
        else:
            self._left.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = None

    def chunk(self, sequence: Sequence, length: int, num_samples: int) -> Chunk:
        """Plan the sequence's next ``length`` positions; its blocks are reserved."""
        start, stop = sequence.num_planned, sequence.num_planned + length
        assert sequence.slot is not None
        assert stop <= len(sequence.blocks) * self.block_size
        known = tuple(sequence.token_ids[start:stop])
        assert known or length == 1
        if sequence.slot in self._untold:  # the join carries the whole table
            sequence.num_known_blocks = len(sequence.blocks)
        new_blocks: tuple[BlockId, ...] = ()
        if sequence.num_known_blocks < len(sequence.blocks):
            new_blocks = tuple(sequence.blocks[sequence.num_known_blocks :])
            sequence.num_known_blocks = len(sequence.blocks)
        sequence.num_planned = stop
        return Chunk(sequence.slot, start, known or CARRIED, new_blocks, num_samples)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let the child share the parent's KV of the prompt; a partly filled last block is copied.

        False, and nothing changed, if no block is free for the copy.
        """
        num_full, remainder = divmod(parent.num_prompt, self.block_size)
        if remainder and not self.pool.num_free:
            return False
        shared = parent.blocks[:num_full]
        self.pool.share(shared)
        child.blocks = list(shared)
        if remainder:
            (destination,) = self.pool.allocate(1)
            self._copies.add(parent.blocks[num_full], destination)
            child.blocks.append(destination)
        child.num_planned = parent.num_prompt
        child.block_names = parent.block_names[:num_full]
        child.num_named = num_full
        return True

    def batch(self, chunks: list[Chunk], sequences: list[Sequence]) -> Batch | None:
        """The next step, with what the ranks must be told before it; None if nothing runs."""
        if not chunks:
            return None
        # Who has no chunk yet joins later: all at once they could be millions of tokens to tell.
        joining = [s for s in sequences if s.slot in self._untold]
        batch = Batch(
            step=self._next_step,
            joined=tuple(map(_join, joining)),
            left=tuple(self._left),
            copies=self._copies.take(),
            chunks=tuple(chunks),
            masks=tuple(_masks(chunks, sequences)),
        )
        self._untold.difference_update(sequence.slot for sequence in joining)
        self._in_flight.append(_InFlight(batch.step, sequences, ends_of(batch.copies)))
        for sequence in sequences:
            sequence.num_in_flight += 1
        self._left = []
        self._next_step += 1
        return batch

    def last_batch(self) -> Batch | None:
        """The step after which the ranks hold no slot of this node; None if they hold none now.

        Nothing is planned after it.
        """
        if not self._left:
            return None
        return Batch(step=self._next_step, left=tuple(self._left))

    def retire(self, batch: Batch) -> Run[Sequence]:
        """The oldest step in flight is done; returns the sequence of each chunk."""
        step = self._in_flight.popleft()
        assert step.step == batch.step, f"step {batch.step} retired, {step.step} expected"
        self.pool.free(step.copied)
        names = self._enable_prefix_caching
        for sequence, chunk in zip(step.sequences, batch.chunks, strict=True):
            sequence.num_in_flight -= 1
            end = chunk.start + chunk.length
            if names and end // self.block_size > sequence.num_named:
                self._name_blocks(sequence, end)
            if sequence.released:
                self._settle(sequence)
        return step.sequences

    def begin_transfer(self, sequence: Sequence) -> None:
        """From now on a handoff may read or write the sequence's blocks."""
        assert not sequence.in_transfer
        sequence.in_transfer = True

    def received(self, sequence: Sequence) -> None:
        """A handoff has brought all KV of the sequence's prompt, and is over."""
        self._name_blocks(sequence, sequence.num_prompt)
        self.end_transfer(sequence)

    def end_transfer(self, sequence: Sequence) -> None:
        """No handoff touches the sequence's blocks any more."""
        sequence.in_transfer = False
        self._settle(sequence)

    def release(self, sequence: Sequence) -> None:
        """The sequence is over here: slot back now, blocks as soon as nothing touches them."""
        if sequence.released:
            return
        sequence.over = sequence.released = True
        self.leave(sequence)
        self.num_draining_blocks += len(sequence.blocks)
        self._settle(sequence)

    def _caches(self, sequence: Sequence) -> bool:
        return self._enable_prefix_caching and sequence.is_cacheable

    def _cached(self, sequence: Sequence) -> list[BlockId]:
        """The blocks with the longest known beginning of the prompt.

        Never the whole prompt: its last token is computed, as the first output is sampled after it.
        """
        if not self._caches(sequence):
            return []
        self._extend_names(sequence)
        most = (sequence.num_prompt - 1) // self.block_size
        return self.pool.cache.find(sequence.block_names[:most])

    def _name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of positions [0, num_tokens) is in the blocks: others may find the full ones."""
        # A token that was sampled after the sequence's end is not known here, its KV is of no use.
        num_full = min(num_tokens, len(sequence.token_ids)) // self.block_size
        if not self._caches(sequence) or num_full <= sequence.num_named:
            return
        self._extend_names(sequence)
        for i in range(sequence.num_named, num_full):
            self.pool.cache.name(sequence.blocks[i], sequence.block_names[i])
        sequence.num_named = num_full

    def _extend_names(self, sequence: Sequence) -> None:
        names, tokens = sequence.block_names, sequence.token_ids
        extend_hashes(names, tokens, self.block_size, sequence.cache_salt)

    def _settle(self, sequence: Sequence) -> None:
        if not sequence.released or sequence.num_in_flight or sequence.in_transfer:
            return
        self.num_draining_blocks -= len(sequence.blocks)
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        self._copies.drop_pointless()


def _masks(chunks: Run[Chunk], sequences: Run[Sequence]) -> Iterator[TokenMask]:
    for chunk, sequence in zip(chunks, sequences, strict=True):
        if chunk.num_samples and sequence.constraint is not None:
            bits = sequence.constraint.mask
            assert bits is not None, "planned before its mask was known"
            yield TokenMask(slot=chunk.slot, bits=bits)


def _join(sequence: Sequence) -> Joined:
    assert sequence.slot is not None
    sampling = sequence.sampling
    return Joined(
        slot=sequence.slot,
        sampling=sampling,
        choices=sequence.choices,
        end_token_ids=sequence.end_token_ids,
        prompt_len=sequence.prompt_len,
        history=tuple(sequence.token_ids) if sampling.needs_history else (),
        blocks=tuple(sequence.blocks),
    )
