"""Every block is free or owned and counted, whatever is asked for in whatever order."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.kv_layout import BlockId
from pdserve.engine.block_pool import BlockPool


def test_a_new_pool_is_all_free():
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_free) == (5, 5)
    pool.check()


def test_the_whole_pool_can_be_taken_and_every_block_is_another():
    pool = BlockPool(5)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.allocate(0) == []


def test_more_than_is_free_is_refused_and_nothing_is_taken():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_owner():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert (pool.num_free, pool.num_owners(blocks[0])) == (1, 1)
    pool.free(blocks)
    assert (pool.num_free, pool.num_owners(blocks[0])) == (2, 0)


def test_freeing_a_free_block_is_found_at_once():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    pool.check()


def test_a_free_block_can_not_be_shared():
    with pytest.raises(AssertionError, match="is free"):
        BlockPool(2).share([BlockId(1)])


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 30)), max_size=60
)


@given(num_blocks=st.integers(0, 12), operations=OPERATIONS)
def test_counts_and_free_blocks_add_up_after_every_operation(
    num_blocks: int, operations: list[tuple[str, int]]
):
    pool = BlockPool(num_blocks)
    owners: Counter[BlockId] = Counter()
    for name, number in operations:
        owned = sorted(owners.elements())
        if name == "allocate":
            taken = pool.allocate(number % (pool.num_free + 1))
            assert not set(taken) & set(owners.elements())
            owners.update(taken)
        elif owned and name == "share":
            pool.share([owned[number % len(owned)]])
            owners.update([owned[number % len(owned)]])
        elif owned:
            pool.free([owned[number % len(owned)]])
            owners.subtract([owned[number % len(owned)]])
        pool.check()
        assert pool.num_free == num_blocks - len(set(owners.elements()))
        assert all(pool.num_owners(b) == owners[b] for b in map(BlockId, range(num_blocks)))
