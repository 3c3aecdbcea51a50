"""Every block is free, idle or owned and counted, whatever is asked for in whatever order."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.core.kv_layout import BlockId
from pdserve.core.prefix_hash import PrefixHash
from pdserve.engine.block_pool import BlockPool


def names(*numbers: int) -> list[PrefixHash]:
    return [PrefixHash(bytes([number])) for number in numbers]


def named(pool: BlockPool, *numbers: int) -> list[BlockId]:
    """New blocks with these names, each with one owner."""
    blocks = pool.allocate(len(numbers))
    for block, name in zip(blocks, names(*numbers), strict=True):
        pool.cache.name(block, name)
    return blocks


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


# ---- named blocks ---------------------------------------------------------------------------


def test_a_named_block_without_owners_can_be_found_and_counts_as_free():
    pool = BlockPool(4)
    blocks = named(pool, 1, 2)
    pool.free(blocks)
    pool.check()
    assert (pool.num_free, pool.num_owners(blocks[0])) == (4, 0)
    assert pool.cache.find(names(1, 2, 3)) == blocks
    pool.share(blocks)
    assert (pool.num_free, pool.num_owners(blocks[0])) == (2, 1)
    pool.check()


def test_a_run_ends_with_the_first_name_that_no_block_has():
    pool = BlockPool(4)
    blocks = named(pool, 1, 3)
    assert pool.cache.find(names(1, 2, 3)) == blocks[:1]
    assert pool.cache.find(names(2, 1)) == []


def test_blocks_that_hold_nothing_are_taken_before_idle_ones():
    pool = BlockPool(3)
    blocks = named(pool, 1)
    pool.free(blocks)
    pool.allocate(2)
    assert pool.cache.find(names(1)) == blocks
    assert pool.allocate(1) == blocks
    assert pool.cache.find(names(1)) == []
    pool.check()


def test_the_prefix_that_was_used_least_recently_goes_first_and_from_its_end_on():
    pool = BlockPool(4)
    older, newer = named(pool, 1, 2), named(pool, 3, 4)
    pool.free(older)
    pool.free(newer)
    pool.share(older)
    pool.free(older)
    assert [pool.allocate(1) for _ in range(4)] == [[b] for b in (*newer[::-1], *older[::-1])]


def test_of_two_blocks_with_the_same_contents_one_is_named():
    pool = BlockPool(2)
    first, second = named(pool, 1), named(pool, 1)
    assert pool.cache.find(names(1)) == first
    pool.free([*first, *second])
    pool.check()
    assert pool.allocate(1) == second


# ---- everything at once ---------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """A model of the pool: who owns what, which names are idle since when."""

    @initialize(num_blocks=st.integers(0, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.owners: Counter[BlockId] = Counter()
        self.name_of: dict[BlockId, PrefixHash] = {}
        self.idle: list[BlockId] = []  # least recently used first

    @rule(number=st.integers(0, 30))
    def allocate(self, number):
        count = number % (self.pool.num_free + 1)
        num_empty = self.pool.num_free - len(self.idle)
        taken = self.pool.allocate(count)
        evicted, self.idle = self._split(count - num_empty)
        assert not set(taken) & set(self.owners.elements())
        assert set(taken) & self.name_of.keys() == set(evicted)
        for block in evicted:
            del self.name_of[block]
        self.owners.update(taken)

    @precondition(lambda self: +self.owners)
    @rule(data=st.data(), number=st.integers(0, 5))
    def name(self, data, number):
        block = data.draw(st.sampled_from(sorted(+self.owners)))
        if block not in self.name_of:
            (name,) = names(number)
            is_new = name not in self.name_of.values()
            self.pool.cache.name(block, name)
            self.name_of |= {block: name} if is_new else {}

    @precondition(lambda self: +self.owners or self.idle)
    @rule(data=st.data())
    def share(self, data):
        block = data.draw(st.sampled_from(sorted({*(+self.owners), *self.idle})))
        self.pool.share([block])
        self.owners[block] += 1
        self.idle = [other for other in self.idle if other != block]

    @precondition(lambda self: +self.owners)
    @rule(data=st.data())
    def free(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(+self.owners)), unique=True))
        self.pool.free(blocks)
        self.owners.subtract(blocks)
        self.idle += [b for b in blocks[::-1] if not self.owners[b] and b in self.name_of]

    @rule(numbers=st.lists(st.integers(0, 5), max_size=4))
    def find(self, numbers):
        found = self.pool.cache.find(names(*numbers))
        wanted = names(*numbers)
        assert [self.name_of[block] for block in found] == wanted[: len(found)]
        assert len(found) == len(numbers) or wanted[len(found)] not in self.name_of.values()

    @invariant()
    def holds(self):
        if hasattr(self, "pool"):
            pool = self.pool
            pool.check()
            blocks = [BlockId(i) for i in range(pool.num_blocks)]
            assert pool.num_free == sum(not self.owners[block] for block in blocks)
            assert all(pool.num_owners(block) == self.owners[block] for block in blocks)
            assert [b for b in blocks if pool.cache.is_idle(b)] == sorted(self.idle)

    def _split(self, count):
        count = max(0, count)
        return self.idle[:count], self.idle[count:]


TestAnyOrder = PoolMachine.TestCase
TestAnyOrder.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
