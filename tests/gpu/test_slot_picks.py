"""The kernels that end a step keep its logits and pick what the plain ones pick."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Slot
from pdserve.engine.noise import row_key, stream_of
from pdserve.engine.sampling_race import Lots, fast_race
from pdserve.engine.slot_picks import SlotPicks, pick_on
from tests.engine.plain_picks import PlainPick
from tests.gpu.test_sampling_race import samplings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU = torch.device("cuda:0")
VOCAB_SIZES = st.sampled_from([1, 50, 8192, 8193, 49_152, 151_936])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def some_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Rows with a stride of their own; ties in 16 bits."""
    return (torch.randn(num_rows, vocab_size + 16, device=GPU) * 4).to(dtype)[:, :vocab_size]


@settings(max_examples=25)
@given(
    num_rows=st.integers(1, 70),
    vocab_size=VOCAB_SIZES,
    dtype=DTYPES,
    seed=st.integers(0, 1 << 40),
)
def test_without_draws_it_is_argmax_and_a_copy(
    num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = some_logits(num_rows, vocab_size, dtype)
    kept = torch.full((num_rows, vocab_size), 7.0, dtype=dtype, device=GPU)
    tokens = torch.full((num_rows,), -1, device=GPU)
    slots = torch.arange(num_rows, device=GPU)
    pick_on(GPU)(logits, slots, slots, SlotPicks(num_rows, GPU).table, tokens, kept)
    assert torch.equal(kept, logits)
    numbers = torch.arange(vocab_size, device=GPU)
    largest = logits == logits.amax(1, keepdim=True)
    assert torch.equal(tokens, torch.where(largest, numbers, vocab_size).amin(1))


@settings(max_examples=40)
@given(
    vocab_size=VOCAB_SIZES,
    wants=st.lists(samplings() | st.none(), min_size=1, max_size=9),
    dtype=DTYPES,
    seed=st.integers(0, 1 << 40),
    random=st.randoms(use_true_random=False),
)
def test_draws_are_those_of_the_race(vocab_size, wants, dtype, seed, random) -> None:
    """Bit for bit, in any slots, beside those that take the likeliest."""
    torch.manual_seed(seed)
    race = fast_race(GPU)
    assert race is not None
    logits = some_logits(len(wants), vocab_size, dtype)
    picks = SlotPicks(16, GPU)
    slots = [Slot(slot) for slot in random.sample(range(16), len(wants))]
    positions = [random.randrange(1 << 31) for _ in wants]
    drawn: list[tuple[int, tuple[int, int], SamplingParams]] = []
    for row, (slot, want) in enumerate(zip(slots, wants, strict=True)):
        picks.draw(slot, 5, SamplingParams(max_tokens=1))  # a tenant before
        picks.write()
        if want is None:
            picks.take_likeliest(slot)
            continue
        stream = stream_of(seed, row)
        picks.draw(slot, stream, want)
        drawn.append((row, row_key(stream, positions[row]), want))
    picks.write()
    slots_there, positions_there = torch.tensor([slots, positions], device=GPU)
    tokens = torch.full((len(wants),), -1, device=GPU)
    pick_on(GPU)(logits, slots_there, positions_there, picks.table, tokens, None)
    rows = [row for row, _, _ in drawn]
    if drawn:
        lots = Lots.of(rows, [key for _, key, _ in drawn], [want for _, _, want in drawn])
        assert tokens[rows].tolist() == race.draw(logits, lots).tolist()
    plain = torch.full_like(tokens, -1)
    PlainPick(vocab_size)(logits, slots_there, positions_there, picks.table, plain, None)
    for row, want in enumerate(wants):
        if want is None:  # of several that are likeliest argmax may take another
            assert logits[row, tokens[row]] == logits[row, plain[row]]


def test_the_spare_slot_takes_the_likeliest() -> None:
    picks = SlotPicks(2, GPU)
    for slot in range(2):
        picks.draw(Slot(slot), 5, SamplingParams(max_tokens=1))
    picks.write()
    logits = torch.randn(1, 1000, device=GPU)
    tokens = torch.empty(1, dtype=torch.int64, device=GPU)
    pick_on(GPU)(
        logits, torch.tensor([2], device=GPU), tokens.new_zeros(1), picks.table, tokens, None
    )
    assert tokens.tolist() == logits.argmax(1).tolist()
