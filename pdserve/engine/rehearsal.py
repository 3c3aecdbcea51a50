"""Steps that no request asked for: small ones to warm a rank up, the largest to measure it.

For a rank that holds no sequence: they use the first slots and blocks and leave them empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pdserve.core.kv_layout import BlockId
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot
from pdserve.engine.engine_config import EngineConfig

WARM_UP_LEN = 16  # tokens of the prompt that warms a rank up
WARM_UP_CHUNKS = ((WARM_UP_LEN,), (1024,), (1024, 1024), (4096,))  # on a GPU, as far as they fit
WIDE_LEN = 4  # of the prompts that warm up steps with as many as there may be
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)
DRAWN = SamplingParams(max_tokens=2, top_p=0.9)
SORTED = SamplingParams(max_tokens=2, top_p=0.9, top_k=20, logprobs=1)  # takes most memory
BIASED = SamplingParams(max_tokens=2, logit_bias=((0, 1.0),))
TOLD = SamplingParams(max_tokens=2, logprobs=1)  # drawn from logits as they lie, but not picked
SCORED = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
WAYS = (GREEDY, DRAWN, SORTED, BIASED, TOLD, SCORED)  # to sample: they differ in their kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Batches to be run in turn, and how many blocks they touch."""

    batches: tuple[Batch, ...]
    num_blocks: int


def warm_up(config: EngineConfig, num_blocks: int) -> tuple[Batch, ...]:
    """One prompt and one decode step. On a GPU more of them, with all kernels that steps run.

    They touch blocks of the first ``num_blocks`` only.
    """
    prompts: list[tuple[tuple[int, ...], SamplingParams]]
    if torch.device(config.device).type == "cpu":
        prompts = [((min(WARM_UP_LEN, config.max_model_len - 1),), GREEDY)]
    else:
        longest = min(config.max_model_len, num_blocks * config.block_size) - 1
        widest = min(longest, config.max_num_batched_tokens)
        fitting = [c for c in WARM_UP_CHUNKS if sum(c) <= longest and max(c) <= widest]
        fitting = fitting or [(min(WARM_UP_LEN, widest),)]
        prompts = [(chunks, way) for way in WAYS for chunks in fitting]
    batches: list[Batch] = []
    for chunks, sampling in prompts:
        batches += _prompt_and_decode(config, chunks, sampling, first_step=len(batches))
    if torch.device(config.device).type != "cpu":
        batches += _two_wide_steps(config, num_blocks, first_step=len(batches))
    return tuple(batches)


def largest_steps(config: EngineConfig, most_blocks: int) -> Rehearsal:
    """As many prompt tokens as a step may hold, at their prompts' beginning and at the end of the
    longest sequences that there can be; then some choices of as many sequences as there may be.

    No cache has more than ``most_blocks``. What long sequences hold before their last chunk lies in
    few blocks, again and again, so that no large cache is needed to measure them.
    """
    longest = min(config.max_model_len, most_blocks * config.block_size)
    whole, rest = divmod(config.max_num_batched_tokens, longest)
    lengths = [longest] * whole + ([rest] if rest else [])
    lengths = lengths[: config.max_num_seqs]
    ones = [1] * min(config.max_num_seqs, config.max_num_batched_tokens)
    prompts, prompt_blocks = _joined(config, lengths, SORTED)
    decodes, decode_blocks = _joined(config, ones, SORTED)
    num_blocks = max(prompt_blocks, decode_blocks)
    num_long = config.layout.num_blocks_for(longest)
    table = tuple(BlockId(i % num_blocks) for i in range(num_long))
    ends = tuple(replace(j, prompt_len=longest, blocks=table) for j in prompts)
    # As many rows as are sampled at once, also where a step has fewer chunks than there are slots.
    num_choices = max(2, -(-config.max_num_seqs // len(ones)))
    choices = tuple(replace(j, choices=tuple(range(num_choices))) for j in decodes)
    steps = (
        (prompts, tuple(_chunk(j.slot, 0, n) for j, n in zip(prompts, lengths, strict=True))),
        (ends, tuple(_chunk(j.slot, longest - n, n) for j, n in zip(ends, lengths, strict=True))),
        (choices, tuple(_chunk(j.slot, 0, 1, num_samples=num_choices) for j in choices)),
        ((), ()),
    )
    batches: list[Batch] = []
    for number, (joined, chunks) in enumerate(steps):
        left = tuple(j.slot for j in steps[number - 1][0]) if number else ()
        batches.append(Batch(step=number, left=left, joined=joined, chunks=chunks))
    return Rehearsal(batches=tuple(batches), num_blocks=num_blocks)


def _prompt_and_decode(
    config: EngineConfig, chunks: Sequence[int], sampling: SamplingParams, *, first_step: int
) -> list[Batch]:
    joined, _ = _joined(config, [sum(chunks) + 1], sampling)
    slot = joined[0].slot
    parts: list[Chunk] = []
    for length in chunks:
        start = sum(part.length for part in parts)
        is_last = start + length == sum(chunks)
        parts.append(
            Chunk(
                slot=slot,
                start=start,
                tokens=(0,) * length,
                new_blocks=(),
                num_samples=int(is_last),
            )
        )
    parts.append(
        Chunk(slot=slot, start=sum(chunks), tokens=Carried(), new_blocks=(), num_samples=1)
    )
    batches = [
        Batch(step=first_step + number, joined=() if number else joined, chunks=(part,))
        for number, part in enumerate(parts)
    ]
    return [*batches, Batch(step=first_step + len(batches), left=(slot,))]


def _two_wide_steps(config: EngineConfig, num_blocks: int, *, first_step: int) -> list[Batch]:
    """First and second chunks of as many prompts as there may be: other kernels than for few."""
    length = 2 * WIDE_LEN
    count = min(
        config.max_num_seqs,
        num_blocks // config.layout.num_blocks_for(length),
        config.max_num_batched_tokens // WIDE_LEN,
    )
    if length > config.max_model_len or count < 1:
        return []
    joined, _ = _joined(config, [length] * count, GREEDY)
    steps = [
        tuple(
            Chunk(slot=j.slot, start=start, tokens=(0,) * WIDE_LEN, new_blocks=(), num_samples=1)
            for j in joined
        )
        for start in (0, WIDE_LEN)
    ]
    return [
        Batch(step=first_step, joined=joined, chunks=steps[0]),
        Batch(step=first_step + 1, chunks=steps[1]),
        Batch(step=first_step + 2, left=tuple(j.slot for j in joined)),
    ]


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


def _chunk(slot: Slot, start: int, length: int, *, num_samples: int = 1) -> Chunk:
    return Chunk(
        slot=slot, start=start, tokens=(0,) * length, new_blocks=(), num_samples=num_samples
    )
