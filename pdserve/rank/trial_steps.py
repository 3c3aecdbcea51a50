"""Steps that no request asked for, so that a node knows its costs before its first request.

Each trial is one life of a few sequences on ranks that hold none: prompts in chunks, some decode
steps, and the slots given back. Every kind is tried once, however busy the machine is: a cost that
knows short steps only would be stretched over long ones. A second time each, while time is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.core.config import DecodeConfig
from pdserve.core.kv_layout import BlockId
from pdserve.core.node import NodeSpec
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot
from pdserve.rank.ranks import Ranks
from pdserve.rank.step_meter import StepMeter

TRIALS_S = 3.0  # no trial is repeated after it
NUM_KINDS = 4
SHORT_LEN = 16
NUM_DECODES = 3  # steps of each trial; the first may be slower
NUM_BESIDE = 8  # sequences that decode together
GREEDY = SamplingParams(max_tokens=NUM_DECODES + 1, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """What a node can take: tokens of a prompt in one step, of one sequence, and slots."""

    chunk_len: int
    max_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decodes: bool  # False: a prefill node

    def trials(self, *, block_size: int, num_blocks: int) -> Iterator[list[Batch]]:
        """Each one's steps, the last of which gives the slots back."""
        capacity = min(self.max_len, block_size * num_blocks)
        num_decodes = self.num_decodes(capacity)
        most = capacity - num_decodes
        short, quarter, chunk_len = self.lengths(capacity)
        blocks_each = -(-(short + num_decodes) // block_size)
        beside = min(
            NUM_BESIDE,
            self.max_num_seqs,
            self.max_num_batched_tokens // short,
            num_blocks // blocks_each,
        )
        one, few, wide = [[short]], [[quarter]], [[short]] * beside
        long = [[chunk_len] * min(2, most // chunk_len)]
        for prompts in (one, few, wide, long) * 2:  # the machine may be busy, or steps new
            yield list(_life(prompts, num_decodes, block_size))

    def num_decodes(self, capacity: int) -> int:
        """Decode steps of a trial where one sequence may have ``capacity`` tokens."""
        return min(NUM_DECODES, capacity - 1) if self.decodes else 0

    def lengths(self, capacity: int) -> tuple[int, int, int]:
        """Tokens of a short chunk, of a quarter of a whole one, and of a whole one."""
        most = capacity - self.num_decodes(capacity)
        whole = min(self.chunk_len, self.max_num_batched_tokens, most)
        return min(SHORT_LEN, whole), -(-whole // 4), whole


def trial_limits(spec: NodeSpec) -> TrialLimits:
    """The limits of a node that is about to start."""
    pool = spec.pool
    chunk_len = pool.max_num_batched_tokens
    if isinstance(pool, DecodeConfig):
        chunk_len = min(chunk_len, pool.local_prefill_tokens or pool.fallback_chunk)
    return TrialLimits(
        chunk_len=chunk_len,
        max_len=spec.max_model_len or spec.model.max_position,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        decodes=isinstance(pool, DecodeConfig),
    )


async def measure_steps(ranks: Ranks, limits: TrialLimits, meter: StepMeter, clock: Clock) -> None:
    """Run the trials on ranks that hold nothing. Raises RankError when the ranks are lost."""
    began_s = clock.now_s()
    trials = limits.trials(block_size=ranks.layout.block_size, num_blocks=ranks.num_blocks)
    for number, batches in enumerate(trials):
        if number >= NUM_KINDS and clock.now_s() - began_s > TRIALS_S:
            return
        for batch in batches:
            submitted_s = clock.now_s()
            await ranks.submit(batch).output()
            meter.observe(batch, clock.now_s() - submitted_s)


def _life(prompts: list[list[int]], num_decodes: int, block_size: int) -> Iterator[Batch]:
    """Sequences with prompts of these chunks from their joining to their leaving."""
    joined = _joined(prompts, num_decodes, block_size)
    step = 0
    for i in range(len(prompts[0])):
        chunks = [_prompt_chunk(entry.slot, prompts[entry.slot], i) for entry in joined]
        yield Batch(step=step, joined=() if step else joined, chunks=tuple(chunks))
        step += 1
    for i in range(num_decodes):
        yield Batch(
            step=step,
            chunks=tuple(
                Chunk(
                    slot=entry.slot,
                    start=sum(prompts[entry.slot]) + i,
                    tokens=Carried(),
                    new_blocks=(),
                    num_samples=1,
                )
                for entry in joined
            ),
        )
        step += 1
    yield Batch(step=step, left=tuple(entry.slot for entry in joined))


def _joined(prompts: list[list[int]], num_decodes: int, block_size: int) -> tuple[Joined, ...]:
    joined, first = [], 0
    for number, chunks in enumerate(prompts):
        end = first + -(-(sum(chunks) + num_decodes) // block_size)
        joined.append(
            Joined(
                slot=Slot(number),
                sampling=GREEDY,
                choices=(0,),
                end_token_ids=(),
                prompt_len=sum(chunks),
                history=(),
                blocks=tuple(BlockId(block) for block in range(first, end)),
            )
        )
        first = end
    return tuple(joined)


def _prompt_chunk(slot: Slot, chunks: list[int], number: int) -> Chunk:
    return Chunk(
        slot=slot,
        start=sum(chunks[:number]),
        tokens=(0,) * chunks[number],
        new_blocks=(),
        num_samples=1 if number == len(chunks) - 1 else 0,
    )
