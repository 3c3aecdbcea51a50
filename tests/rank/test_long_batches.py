"""Steps that tell the ranks much at once: what schedulers plan comes to the ranks as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.engine.batch import Batch, Joined, Slot, TokenMask
from pdserve.rank.ring import RingReader, RingWriter, create_ring
from pdserve.rank.ring_ranks import STEPS_BYTES
from pdserve.rank.wire import decode, encode
from tests.decode_node.world import make_world
from tests.engine.ledgers import BLOCK_SIZE, make_ledger, make_sequence
from tests.prefill_node.world import World as PrefillWorld

SMALL_RING = 1 << 10


@contextmanager
def ring(path: Path, capacity: int) -> Iterator[tuple[RingWriter, RingReader]]:
    create_ring(path / "ring", capacity=capacity, num_readers=1)
    reader, writer = RingReader(path / "ring"), RingWriter(path / "ring")
    yield writer, reader
    writer.close()
    reader.close()


def sent(batch: Batch, writer: RingWriter, reader: RingReader) -> object:
    """What a rank gets of a batch."""
    record = encode(batch)
    while not writer.try_write(record):
        assert reader.read(timeout_s=0) is None, "half of a record"
    got = reader.read(timeout_s=0)
    assert got is not None
    return decode(got)


def test_sixteen_choices_of_a_long_prompt_with_a_penalty_come_through_the_ring(tmp_path):
    prompt_len = 65_000
    ledger = make_ledger(prompt_len // BLOCK_SIZE + 100, num_slots=16)
    parent = make_sequence(prompt_len, presence_penalty=0.1)
    assert ledger.reserve(parent, prompt_len)
    children = [parent.forked(choice) for choice in range(16)]
    for child in children:
        child.append(5)
        assert ledger.fork(parent, child)
        ledger.enter(child)
        assert ledger.reserve(child, prompt_len + 1)
    batch = ledger.batch([ledger.chunk(child, 1, 1) for child in children], children)
    assert batch is not None
    assert len(encode(batch)) > STEPS_BYTES // 2
    with ring(tmp_path, STEPS_BYTES) as (writer, reader):
        assert sent(batch, writer, reader) == batch


@pytest.mark.parametrize("route", ["remote", "local"])
def test_choices_of_long_prompts_get_their_answers_by_batches_longer_than_the_ring(tmp_path, route):
    world = make_world(400, max_num_seqs=16, max_num_batched_tokens=64)
    for num_choices in (16, 3, 7):
        world.ask(150, 5, route=route, num_choices=num_choices, penalty=0.5)
    world.finish()
    assert any(len(encode(batch)) > SMALL_RING for batch in world.batches)
    with ring(tmp_path, SMALL_RING) as (writer, reader):
        for batch in world.batches:
            assert sent(batch, writer, reader) == batch


def test_masks_of_many_sequences_come_through_the_ring(tmp_path):
    masks = tuple(TokenMask(slot=Slot(i), bits=bytes([i % 256]) * 19_000) for i in range(1024))
    batch = Batch(step=7, masks=masks)
    assert len(encode(batch)) > STEPS_BYTES
    with ring(tmp_path, STEPS_BYTES) as (writer, reader):
        assert sent(batch, writer, reader) == batch


def told_bytes(joined: Joined) -> int:
    return 8 * (len(joined.history) + len(joined.blocks))


def test_prompts_that_start_together_are_told_one_by_one_on_a_decode_node():
    num_prompts, prompt_len = 8, 100
    world = make_world(400, local_prefill_tokens=16)
    for _ in range(num_prompts):
        world.ask(prompt_len, 3, penalty=0.5)
    world.finish()
    told = [sum(map(told_bytes, batch.joined)) for batch in world.batches]
    assert max(told) <= 2 * sum(told) / num_prompts


def test_prompts_that_start_together_are_told_one_by_one_on_a_prefill_node():
    num_prompts, prompt_len = 8, 100
    world = PrefillWorld(num_blocks=400, max_num_batched_tokens=32)
    for _ in range(num_prompts):
        world.ask(prompt_len, penalty=0.5)
    world.finish()
    told = [sum(map(told_bytes, batch.joined)) for batch in world.batches]
    assert max(told) <= 2 * sum(told) / num_prompts
