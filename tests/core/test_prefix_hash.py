"""Names of blocks by content: equal exactly where all tokens up to the block's end are equal."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.prefix_hash import PrefixHash, extend_hashes, prefix_hashes

TOKENS = st.lists(st.integers(0, 3), max_size=24)


def common_len(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None) or (
        min(len(left), len(right)) if left[:1] == right[:1] else 0
    )


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_names_agree_as_far_as_full_blocks_of_tokens_agree(
    left: list[int], right: list[int], block_size: int
) -> None:
    pairs = zip(prefix_hashes(left, block_size), prefix_hashes(right, block_size), strict=False)
    agree = [a == b for a, b in pairs]
    assert sum(agree) == common_len(left, right) // block_size
    assert agree == sorted(agree, reverse=True)


@given(TOKENS, st.integers(1, 5))
def test_only_full_blocks_have_names(tokens: list[int], block_size: int) -> None:
    assert len(prefix_hashes(tokens, block_size)) == len(tokens) // block_size


def test_salts_separate_tenants() -> None:
    tokens = list(range(32))
    assert not set(prefix_hashes(tokens, 16, b"a")) & set(prefix_hashes(tokens, 16, b"b"))


def test_a_block_under_another_parent_has_another_name() -> None:
    assert prefix_hashes([1, 2, 1, 2], 2)[0] != prefix_hashes([1, 2, 1, 2], 2)[1]


@given(TOKENS, st.lists(st.integers(0, 24), max_size=4), st.integers(1, 5))
def test_names_of_a_growing_list_are_those_of_the_whole(
    tokens: list[int], stops: list[int], block_size: int
) -> None:
    hashes: list[PrefixHash] = []
    for stop in (*sorted(stops), len(tokens)):
        extend_hashes(hashes, tokens[:stop], block_size, b"salt")
    assert tuple(hashes) == prefix_hashes(tokens, block_size, b"salt")
