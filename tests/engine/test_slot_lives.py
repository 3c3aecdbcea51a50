"""Slots with tenants of all kinds, one after another: picked in graphs or sampled after them,
tokens are those of a runner that has neither.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Slot, TokenMask
from pdserve.engine.runner import ModelRunner
from tests.engine.families import VOCAB_SIZE
from tests.engine.plain_picks import PlainPick, PlainRace
from tests.engine.runs import GREEDY, chunk, joined
from tests.engine.test_step_graphs import small_runner, with_graphs

DRAWN = SamplingParams(max_tokens=1 << 20, temperature=1.3)
PICKED = [
    GREEDY,
    DRAWN,
    replace(DRAWN, top_p=0.6),
    replace(DRAWN, top_k=5),
    replace(DRAWN, min_p=0.1),
]
OTHERS = [
    replace(DRAWN, top_k=5, top_p=0.8),
    replace(DRAWN, logprobs=2),
    replace(GREEDY, logprobs=1),
    replace(DRAWN, frequency_penalty=1.0),
    replace(GREEDY, repetition_penalty=1.3),
    replace(DRAWN, logit_bias=((3, 5.0),)),
    replace(DRAWN, min_tokens=4),
    replace(GREEDY, min_tokens=4),
    replace(DRAWN, prompt_logprobs=1),
]
NUM_SLOTS, NUM_STEPS = 7, 45
LONGEST_PROMPT, LONGEST = 45, 110
BLOCKS_EACH = 8


@dataclass
class Tenant:
    """A sequence in a slot. With two choices it samples once."""

    prompt: list[int]
    num_choices: int
    position: int = 0


class Lives:
    """Random batches, each possible after those before it."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._tenants: dict[int, Tenant] = {}

    def batch(self, step: int) -> Batch:
        others = self._draw.choice([0.0, 0.0, 0.5])
        left, joins, chunks = [], [], []
        for slot in range(NUM_SLOTS):
            tenant = self._tenants.get(slot)
            is_done = tenant is not None and tenant.position >= len(tenant.prompt)
            if is_done and self._chance(0.2):
                left.append(Slot(slot))
                del self._tenants[slot]
            if slot not in self._tenants and self._chance(0.4):
                joins.append(self._join(slot, self._chance(others)))
                chunks.append(self._chunk(slot))
            elif slot in self._tenants and self._may_go_on(slot) and self._chance(0.85):
                chunks.append(self._chunk(slot))
        masks = [self._mask(c.slot) for c in chunks if c.num_samples and self._chance(0.03)]
        self._draw.shuffle(chunks)
        return Batch(
            step=step,
            left=tuple(left),
            joined=tuple(joins),
            chunks=tuple(chunks),
            masks=tuple(masks),
        )

    def _chance(self, share: float) -> bool:
        return self._draw.random() < share

    def _token(self) -> int:
        return self._draw.randrange(VOCAB_SIZE)

    def _join(self, slot: int, is_other: bool) -> Joined:
        way = replace(
            self._draw.choice(OTHERS if is_other else PICKED), seed=self._draw.randrange(1 << 63)
        )
        prompt = [self._token() for _ in range(self._draw.randint(1, LONGEST_PROMPT))]
        num_choices = 2 if self._chance(0.1) else 1
        self._tenants[slot] = Tenant(prompt, num_choices)
        first = self._draw.randrange(3)
        return joined(
            slot,
            range(BLOCKS_EACH * slot, BLOCKS_EACH * (slot + 1)),
            len(prompt),
            sampling=way,
            end_token_ids=(2, 9),
            choices=tuple(range(first, first + num_choices)),
            history=tuple(prompt) if way.needs_history else (),
        )

    def _may_go_on(self, slot: int) -> bool:
        tenant = self._tenants[slot]
        is_decoding = tenant.position >= len(tenant.prompt)
        return not is_decoding or (tenant.num_choices == 1 and tenant.position < LONGEST)

    def _chunk(self, slot: int) -> Chunk:
        tenant = self._tenants[slot]
        start, left = tenant.position, len(tenant.prompt) - tenant.position
        if left <= 0:
            tenant.position += 1
            return chunk(slot, start, Carried())
        length = self._draw.randint(1, left)
        tenant.position += length
        num_samples = tenant.num_choices if length == left else 0
        return chunk(slot, start, tenant.prompt[start : start + length], num_samples=num_samples)

    def _mask(self, slot: Slot) -> TokenMask:
        bits = bytes(self._draw.randrange(1, 256) for _ in range(-(-VOCAB_SIZE // 8)))
        return TokenMask(slot=slot, bits=bits)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_was_in_a_slot_before(seed: int, model_of: Callable[[str], Path]) -> None:
    plain, picking = small_runner(model_of), small_runner(model_of)
    replayed = with_graphs(picking)
    picking._sampler._pick = PlainPick(VOCAB_SIZE)
    picking._sampler._fast_race = PlainRace()
    lives = Lives(seed)
    batches = [lives.batch(step) for step in range(NUM_STEPS)]
    expected, _ = tokens_of(plain, batches)
    found, num_after = tokens_of(picking, batches)
    assert found == expected
    assert len(replayed) > 10
    assert num_after < sum(bool(tokens) for tokens in expected)  # some were picked in graphs


def tokens_of(runner: ModelRunner, batches: list[Batch]) -> tuple[list[list[tuple[int, ...]]], int]:
    """The tokens of each step, and how many steps were sampled outside a graph."""
    sample, num_after = runner._sample, 0

    def counted(*arguments):
        nonlocal num_after
        num_after += 1
        return sample(*arguments)

    runner._sample = counted  # type: ignore[method-assign]
    tokens = [[s.tokens for s in runner.launch(batch).wait().sampled] for batch in batches]
    return tokens, num_after
