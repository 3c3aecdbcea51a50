"""Ledgers and sequences for tests, and the steps that tests plan with them."""

from pdserve.core.request import RequestKey, SamplingParams
from pdserve.engine.batch import Batch
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence

BLOCK_SIZE = 4


def make_ledger(num_blocks: int = 10, num_slots: int = 4) -> Ledger:
    return Ledger(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_slots=num_slots,
        enable_prefix_caching=True,
    )


def make_sequence(prompt_len: int = 10, **sampling) -> Sequence:
    return Sequence(
        key=RequestKey("r", 0),
        choices=(0,),
        sampling=SamplingParams(max_tokens=20, **sampling),
        prompt_len=prompt_len,
        token_ids=list(range(prompt_len)),
        end_token_ids=(99,),
        max_len=prompt_len + 20,
        arrived_s=0.0,
    )


def entered(ledger: Ledger, prompt_len: int = 10, num_tokens: int | None = None) -> Sequence:
    """A sequence with blocks and a slot that no step has touched."""
    sequence = make_sequence(prompt_len)
    assert ledger.reserve(sequence, num_tokens or prompt_len)
    ledger.enter(sequence)
    return sequence


def plan(ledger: Ledger, sequence: Sequence, length: int, num_samples: int = 0) -> Batch:
    batch = ledger.batch([ledger.chunk(sequence, length, num_samples)], [sequence])
    assert batch is not None
    return batch


def forked(ledger: Ledger, parent: Sequence, choice: int = 1) -> Sequence:
    child = parent.forked(choice)
    assert ledger.fork(parent, child)
    ledger.enter(child)
    return child
