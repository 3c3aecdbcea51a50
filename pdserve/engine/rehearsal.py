"""Steps that no request asked for: small ones to warm a rank up, the largest to measure it.

For a rank that holds no sequence: they use the first slots and blocks and leave them empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.kv_layout import BlockId
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot
from pdserve.engine.engine_config import EngineConfig

WARM_UP_LEN = 16  # tokens of the prompt that warms a rank up
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
DRAWN = SamplingParams(max_tokens=2, top_p=0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Batches to be run in turn, and how many blocks they touch."""

    batches: tuple[Batch, ...]
    num_blocks: int


def warm_up(config: EngineConfig) -> Rehearsal:
    """One prompt and one decode step."""
    length = min(WARM_UP_LEN, config.max_model_len - 1)
    joined, num_blocks = _joined(config, [length + 1], GREEDY)
    slot = joined[0].slot
    decode = Chunk(slot=slot, start=length, tokens=Carried(), new_blocks=(), num_samples=1)
    batches = (
        Batch(step=0, joined=joined, chunks=(_prompt(slot, length),)),
        Batch(step=1, chunks=(decode,)),
        Batch(step=2, left=(slot,)),
    )
    return Rehearsal(batches=batches, num_blocks=num_blocks)


def largest_steps(config: EngineConfig) -> Rehearsal:
    """As many prompt tokens as a step may hold, then a token of as many sequences."""
    whole, rest = divmod(config.max_num_batched_tokens, config.max_model_len)
    lengths = [config.max_model_len] * whole + ([rest] if rest else [])
    lengths = lengths[: config.max_num_seqs]
    ones = [1] * min(config.max_num_seqs, config.max_num_batched_tokens)
    prompts, prompt_blocks = _joined(config, lengths, DRAWN)
    decodes, decode_blocks = _joined(config, ones, DRAWN)
    prompt_chunks = [_prompt(j.slot, n) for j, n in zip(prompts, lengths, strict=True)]
    batches = (
        Batch(step=0, joined=prompts, chunks=tuple(prompt_chunks)),
        Batch(
            step=1,
            left=tuple(j.slot for j in prompts),
            joined=decodes,
            chunks=tuple(_prompt(j.slot, 1) for j in decodes),
        ),
        Batch(step=2, left=tuple(j.slot for j in decodes)),
    )
    return Rehearsal(batches=batches, num_blocks=max(prompt_blocks, decode_blocks))


def _joined(
    config: EngineConfig, lengths: Sequence[int], sampling: SamplingParams
) -> tuple[tuple[Joined, ...], int]:
    """Sequences of these lengths in slots 0 …, and the number of their blocks."""
    joined, first = [], 0
    for number, length in enumerate(lengths):
        end = first + config.layout.num_blocks_for(length)
        joined.append(
            Joined(
                slot=Slot(number),
                sampling=sampling,
                choices=(0,),
                end_token_ids=(),
                prompt_len=length,
                history=(),
                blocks=tuple(BlockId(block) for block in range(first, end)),
            )
        )
        first = end
    return tuple(joined), first


def _prompt(slot: Slot, length: int) -> Chunk:
    return Chunk(slot=slot, start=0, tokens=(0,) * length, new_blocks=(), num_samples=1)
