"""Several choices sampled from one row of logits: the same tokens, never too many rows at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.engine.batch import Slot
from pdserve.engine.sampler import Sampler, SampleRow
from tests.engine.test_sampler import CPU, joined, random_logits, row

VOCAB_SIZE = 50


class MostRows(TorchDispatchMode):
    """The most rows of logits that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[1:] == (VOCAB_SIZE,):
            self.most = max(self.most, len(out))
        return out


def sampler_of_choices(max_num_seqs: int) -> tuple[Sampler, list[int], list[SampleRow]]:
    """Seven choices, three and one, which differ in what they want of their tokens."""
    sampler = Sampler(max_num_seqs=max_num_seqs, vocab_size=VOCAB_SIZE, device=CPU)
    sampler.join(joined(0, choices=range(7), temperature=1.0, seed=3, logprobs=2))
    sampler.join(joined(1, choices=range(3), temperature=0.0, presence_penalty=1.5))
    sampler.join(joined(2, choices=(4,), temperature=1.0, top_p=0.5, presence_penalty=0.5, seed=9))
    repeats = [0] * 7 + [1] * 3 + [2]
    choices = [*range(7), *range(3), 4]
    rows = [row(slot, choice=choice) for slot, choice in zip(repeats, choices, strict=True)]
    return sampler, repeats, rows


@pytest.mark.parametrize("max_num_seqs", [4, 7, 8, 11])
def test_choices_sampled_in_parts_get_the_tokens_of_the_whole(max_num_seqs: int) -> None:
    logits = random_logits(3, VOCAB_SIZE)
    masks = {Slot(1): bytes([0b1010_1010] * 7)}
    whole, repeats, rows = sampler_of_choices(256)
    expected = whole.sample(logits[torch.tensor(repeats)], rows, masks)
    parted, _, _ = sampler_of_choices(max_num_seqs)
    with MostRows() as seen:
        got = parted.sample_repeated(logits, repeats, rows, masks)
    assert seen.most == max_num_seqs
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.has_logprobs
    for number in range(len(rows)):
        assert got.logprobs(number) == expected.logprobs(number)
        assert (got.logprobs(number) is None) == (number >= 7)
    # What was sampled counts for the penalties of the slot with one choice, likewise.
    last = [row(2, position=6, choice=4)]
    assert (
        parted.sample(logits[2:], last).tokens.tolist()
        == whole.sample(logits[2:], last).tokens.tolist()
    )


def test_choices_that_want_no_logprobs_have_none() -> None:
    sampler = Sampler(max_num_seqs=2, vocab_size=VOCAB_SIZE, device=CPU)
    sampler.join(joined(0, choices=range(5), temperature=1.0))
    rows = [row(0, choice=choice) for choice in range(5)]
    sampled = sampler.sample_repeated(random_logits(1, VOCAB_SIZE), [0] * 5, rows)
    assert len(sampled.tokens) == 5
    assert not sampled.has_logprobs
    assert sampled.logprobs(3) is None
