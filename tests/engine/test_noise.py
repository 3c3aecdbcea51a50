"""The noise is the documented function, and it behaves like independent random numbers."""

import math

import pytest
import torch

from pdserve.engine.noise import make_lanes, noise, noise_bits, row_key, stream_of

CPU = torch.device("cpu")
MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1
VOCAB = 4096


def mix64(z: int) -> int:
    z &= MASK_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK_64
    return z ^ (z >> 31)


def documented_bits(seed: int, choice: int, position: int, token_id: int) -> int:
    """The formula of the module's docstring in Python's integers."""
    golden, a, b = 0x9E3779B97F4A7C15, 0x7FEB352D, 0x846CA68B
    key = mix64(mix64(mix64(seed + golden) + choice + 1) + golden * (position + 1))
    x = token_id + 0x9E3779B9 & MASK_32
    x = (x ^ x >> 16) * a & MASK_32
    x = (x ^ x >> 15) * b & MASK_32
    lane = x ^ x >> 16
    h = (lane ^ key & MASK_32) * a & MASK_32
    h = ((h ^ h >> 15) + (key >> 32)) * b & MASK_32
    return (h ^ h >> 16) & 0x7FFFFFFF


def keys_of(*triples: tuple[int, int, int]) -> torch.Tensor:
    keys = [row_key(stream_of(seed, choice), position) for seed, choice, position in triples]
    return torch.tensor(keys, dtype=torch.int32)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.double().flatten(), b.double().flatten())))[0, 1])


@pytest.mark.parametrize(
    ("seed", "choice", "position"),
    [(0, 0, 0), (1, 0, 7), (2**63 - 1, 3, 131071), (123456789, 127, 2**31)],
)
def test_the_bits_are_those_of_the_documented_formula(seed, choice, position):
    bits = noise_bits(keys_of((seed, choice, position)), make_lanes(300, CPU))[0]
    assert bits.tolist() == [documented_bits(seed, choice, position, v) for v in range(300)]


def test_the_bits_never_change_between_versions():
    bits = noise_bits(keys_of((42, 1, 1000)), make_lanes(VOCAB, CPU))[0]
    assert bits[[0, 1, 2, 4095]].tolist() == [2058254351, 1168669100, 625207656, 111025083]


def test_a_row_is_the_same_alone_and_among_others():
    lanes = make_lanes(VOCAB + 3, CPU)  # an odd width: rows start anywhere in a vector register
    triples = [(seed, seed % 3, 11 * seed) for seed in range(9)]
    together = noise(keys_of(*triples), lanes)
    for row, triple in enumerate(triples):
        assert torch.equal(noise(keys_of(triple), lanes)[0], together[row])


def test_a_token_has_the_same_noise_in_a_larger_vocabulary():
    key = keys_of((5, 0, 5))
    small, large = (noise(key, make_lanes(size, CPU)) for size in (100, 1000))
    assert torch.equal(small[0], large[0, :100])


def test_values_are_finite_and_negative_even_at_the_ends():
    ends = torch.tensor([0, 1, 2**31 - 1, 2**31 - 65, 2**31 - 64], dtype=torch.int32)
    u = ends.float().clamp_(0.5, 2.0**31 - 128).mul_(2.0**-31)
    assert u.min() > 0
    assert u.max() < 1
    values = noise(keys_of(*((s, 0, 0) for s in range(64))), make_lanes(VOCAB, CPU))
    assert values.isfinite().all()
    assert values.max() < 0


def test_the_variates_are_exponential():
    values = -noise(keys_of(*((9, 0, p) for p in range(128))), make_lanes(VOCAB, CPU)).double()
    num_bins = 64
    edges = torch.tensor([-math.log1p(-i / num_bins) for i in range(1, num_bins)])
    counts = torch.bincount(torch.bucketize(values.flatten(), edges.double()), minlength=num_bins)
    expected = values.numel() / num_bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 63 + 4 * math.sqrt(2 * 63)


@pytest.mark.parametrize(
    "shift", [0, 8, 16, 23], ids=["lowest byte", "second byte", "third byte", "highest byte"]
)
@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_bytes_are_uniform_along_each_axis_for_each_token(axis, shift):
    names = {
        "seed": [(i, 0, 3) for i in range(2048)],
        "choice": [(3, i, 3) for i in range(2048)],
        "position": [(3, 0, i) for i in range(2048)],
    }[axis]
    bits = noise_bits(keys_of(*names), make_lanes(64, CPU))
    for column in range(64):
        counts = torch.bincount((bits[:, column] >> shift) & 0xFF, minlength=256)
        chi_square = float(((counts - 8.0) ** 2 / 8.0).sum())
        assert 255 - 5 * math.sqrt(510) < chi_square < 255 + 6 * math.sqrt(510)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 1024])
def test_neighbouring_tokens_positions_and_choices_are_uncorrelated(lag):
    num_rows = 256
    lanes = make_lanes(VOCAB, CPU)
    by_position = noise(keys_of(*((1, 0, p) for p in range(num_rows))), lanes)
    shifted = noise(keys_of(*((1, 0, p + lag) for p in range(num_rows))), lanes)
    other_choice = noise(keys_of(*((1, lag, p) for p in range(num_rows))), lanes)
    other_seed = noise(keys_of(*((1 + lag, 0, p) for p in range(num_rows))), lanes)
    bound = 5 / math.sqrt(num_rows * VOCAB / 2)
    assert abs(correlation(by_position, shifted)) < bound
    assert abs(correlation(by_position, other_choice)) < bound
    assert abs(correlation(by_position, other_seed)) < bound
    assert abs(correlation(by_position[:, lag:], by_position[:, :-lag])) < bound


@pytest.mark.parametrize("bit", range(0, 63, 3))
def test_a_bit_of_seed_choice_position_or_token_changes_half_of_the_bits(bit):
    lanes = make_lanes(VOCAB, CPU)
    plain, seed, choice, position = noise_bits(
        keys_of(
            (77, 5, 900), (77 ^ 1 << bit, 5, 900), (77, 5 ^ 1 << bit, 900), (77, 5, 900 ^ 1 << bit)
        ),
        lanes,
    )
    token = plain[torch.arange(VOCAB) ^ (1 << bit % 12)]
    for other in (seed, choice, position, token):
        changed = plain ^ other
        shares = torch.stack([((changed >> b) & 1).float().mean() for b in range(31)])
        assert (shares - 0.5).abs().max() < 5 * 0.5 / math.sqrt(VOCAB / 2)
