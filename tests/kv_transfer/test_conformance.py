"""What every transport must do: KV arrives bit by bit, in any shape, in any company."""

import random

import pytest
import torch

from kv_transfer.commands import HandoffFailed, HandoffReceived, HandoffSent
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import HandoffId
from tests.kv_transfer.lending import CUDA_IPC
from tests.kv_transfer.nodes import Node, World, blocks, connect, handoff, layout, prompt_kv

SHAPES = {
    "equal": (layout(), layout()),
    "equal TP 2": (layout(tp_size=2), layout(tp_size=2)),
    "heads merge": (layout(tp_size=3, num_kv_heads=3), layout(num_kv_heads=3)),
    "heads split": (layout(num_kv_heads=3), layout(tp_size=3, num_kv_heads=3)),
    "heads regroup": (
        layout(tp_size=4, num_kv_heads=8, num_layers=2),
        layout(tp_size=2, num_kv_heads=8, num_layers=2),
    ),
    "replicas to few": (layout(tp_size=4), layout(tp_size=2)),
    "few to replicas": (layout(tp_size=1), layout(tp_size=4)),
    "replicas both": (layout(tp_size=4, num_kv_heads=1), layout(tp_size=2, num_kv_heads=1)),
    "blocks split": (layout(block_size=16), layout(block_size=4)),
    "blocks merge": (layout(block_size=4), layout(block_size=16)),
    "blocks regroup": (layout(block_size=12), layout(block_size=8)),
    "blocks coprime": (layout(block_size=5), layout(block_size=3)),
    "TP and blocks": (layout(tp_size=2, block_size=6), layout(block_size=4)),
    "bfloat16": (layout(dtype="bfloat16", tp_size=2), layout(dtype="bfloat16")),
    "pieces larger than a frame": (
        layout(num_kv_heads=3, num_layers=10),
        layout(num_kv_heads=3, num_layers=10, tp_size=3),
    ),
}


def transfer(
    sender: Node,
    receiver: Node,
    name: str,
    num_tokens: int,
    *,
    start: int = 0,
    chunk: int = 64,
    ours: range = range(64),
    theirs: range = range(64),
) -> tuple[torch.Tensor, list[BlockId]]:
    """Move one prompt from ``start`` on in chunks, as a prefill does.

    Returns its whole KV and where it should be.
    """
    kv = prompt_kv(sender.layout, num_tokens, seed=num_tokens)
    from_table = shuffled(ours)[: sender.layout.num_blocks_for(num_tokens)]
    to_table = shuffled(theirs)[: receiver.layout.num_blocks_for(num_tokens)]
    receiver.expect(handoff(name), sender.peer_id, num_tokens, to_table, start=start)
    sender.write(kv, from_table)
    for first in range(start, num_tokens, chunk):
        stop = min(first + chunk, num_tokens)
        table = from_table[: sender.layout.num_blocks_for(stop)]
        sender.push(
            handoff(name), receiver.peer_id, range(first, stop), table, last=stop == num_tokens
        )
    return kv, to_table


def shuffled(numbers: range) -> list[BlockId]:
    return [BlockId(n) for n in random.Random(1).sample(numbers, len(numbers))]


@pytest.mark.parametrize("shape", SHAPES)
def test_kv_arrives_bit_by_bit(world: World, shape: str) -> None:
    sender, receiver = world.pair(*SHAPES[shape])
    before = [cache.clone() for cache in receiver.caches]
    kv, table = transfer(sender, receiver, "a", 149, chunk=48)
    sent = sum(event.num_bytes for event in sender.wait(HandoffSent, handoff("a")))
    received = sum(event.num_bytes for event in receiver.wait(HandoffReceived, handoff("a")))
    assert receiver.holds(kv, table)
    assert sent == received >= receiver.layout.token_bytes * receiver.layout.tp_size * 149
    others = [block for block in range(64) if block not in table]
    for cache, old in zip(receiver.caches, before, strict=True):
        assert torch.equal(cache[others], old[others])
    assert not sender.leftover()
    assert not receiver.leftover()


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_the_receiver_has_are_neither_sent_nor_written(
    world: World, shape: str
) -> None:
    sender, receiver = world.pair(*SHAPES[shape])
    num_had = 70 // receiver.layout.block_size
    start = num_had * receiver.layout.block_size
    before = [cache.clone() for cache in receiver.caches]
    kv, table = transfer(sender, receiver, "a", 149, start=start, chunk=48)
    sent = sum(event.num_bytes for event in sender.wait(HandoffSent, handoff("a")))
    received = sum(event.num_bytes for event in receiver.wait(HandoffReceived, handoff("a")))
    assert receiver.holds(kv[:, :, :, start:], table[num_had:])
    least = receiver.layout.token_bytes * receiver.layout.tp_size * (149 - start)
    spare = receiver.layout.token_bytes * receiver.layout.tp_size * sender.layout.block_size
    assert least <= sent == received < least + spare
    others = [block for block in range(64) if block not in table[num_had:]]
    for cache, old in zip(receiver.caches, before, strict=True):
        assert torch.equal(cache[others], old[others])


def test_pushes_that_begin_elsewhere_than_expected_fail_the_handoff(world: World) -> None:
    sender, receiver = world.pair()
    receiver.expect(handoff("a"), sender.peer_id, 48, blocks(3, 4, 5), start=32)
    sender.push(handoff("a"), receiver.peer_id, range(16, 48), blocks(1, 2, 6))
    assert "are expected" in receiver.wait(HandoffFailed, handoff("a"))[0].message
    assert "are expected" in sender.wait(HandoffFailed, handoff("a"))[0].message
    assert receiver.is_untouched(blocks(3, 4))


@pytest.mark.parametrize("start", [-16, 8, 64])
def test_a_start_within_a_piece_or_outside_the_prompt_is_refused(world: World, start: int) -> None:
    sender, receiver = world.pair()
    receiver.expect(handoff("a"), sender.peer_id, 48, blocks(3, 4, 5), start=start)
    assert f"from {start} on" in receiver.wait(HandoffFailed, handoff("a"))[0].message


def test_a_first_push_within_a_piece_is_refused(world: World) -> None:
    sender, receiver = world.pair()
    sender.push(handoff("a"), receiver.peer_id, range(8, 48), blocks(1, 2, 6))
    assert "starts at token 8" in sender.wait(HandoffFailed, handoff("a"))[0].message


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 160])
def test_prompts_of_any_length_arrive_whole(world: World, num_tokens: int) -> None:
    sender, receiver = world.pair(layout(), layout(block_size=8))
    kv, table = transfer(sender, receiver, "a", num_tokens)
    receiver.wait(HandoffReceived, handoff("a"))
    assert receiver.holds(kv, table)


def test_the_end_may_be_pushed_after_all_tokens(world: World) -> None:
    sender, receiver = world.pair()
    kv = prompt_kv(sender.layout, 32, 1)
    receiver.expect(handoff("a"), sender.peer_id, 32, blocks(3, 4))
    sender.write(kv, blocks(1, 2))
    sender.push(handoff("a"), receiver.peer_id, range(32), blocks(1, 2), last=False)
    receiver.wait(HandoffReceived, handoff("a"))
    sender.push(handoff("a"), receiver.peer_id, range(32, 32), blocks(1, 2), last=True)
    assert sender.wait(HandoffSent, handoff("a"))[0].num_bytes == 32 * sender.layout.token_bytes
    assert receiver.holds(kv, blocks(3, 4))


def test_many_handoffs_interleave_and_each_arrives_whole(world: World) -> None:
    sender, receiver = world.pair(layout(tp_size=2), layout(block_size=8))
    order = random.Random(5)
    ours, theirs = shuffled(range(64)), shuffled(range(64))
    moving: dict[HandoffId, tuple[torch.Tensor, list[BlockId], list[BlockId]]] = {}
    chunks = []
    for number, num_tokens in enumerate([130, 20, 5, 90, 33, 48, 1, 64]):
        name, kv = handoff(str(number)), prompt_kv(sender.layout, num_tokens, number)
        from_table = [ours.pop() for _ in range(sender.layout.num_blocks_for(num_tokens))]
        to_table = [theirs.pop() for _ in range(receiver.layout.num_blocks_for(num_tokens))]
        moving[name] = kv, from_table, to_table
        sender.write(kv, from_table)
        receiver.expect(name, sender.peer_id, num_tokens, to_table)
        chunks += [(order.random() + start, name, start) for start in range(0, num_tokens, 32)]
    for _, name, start in sorted(chunks):
        kv, from_table, _ = moving[name]
        stop = min(start + 32, kv.shape[3])
        sender.push(
            name, receiver.peer_id, range(start, stop), from_table, last=stop == kv.shape[3]
        )
    for name, (kv, _, to_table) in moving.items():
        receiver.wait(HandoffReceived, name)
        sender.wait(HandoffSent, name)
        assert receiver.holds(kv, to_table)


def test_a_small_handoff_overtakes_a_huge_one(world: World) -> None:
    if world.transport == CUDA_IPC:
        pytest.skip("what is lent is one frame of up to 256 MiB: this one is not huge there")
    sender, receiver = world.pair(layout(), layout())
    huge, small = range(60), range(60, 62)
    receiver.expect(handoff("huge"), sender.peer_id, 16 * len(huge), blocks(*huge))
    receiver.expect(handoff("small"), sender.peer_id, 16 * len(small), blocks(*small))
    sender.push(handoff("huge"), receiver.peer_id, range(16 * len(huge)), blocks(*huge))
    sender.push(handoff("small"), receiver.peer_id, range(16 * len(small)), blocks(*small))
    receiver.wait(HandoffReceived, handoff("huge"))
    order = [event.handoff for event in receiver.leftover() if isinstance(event, HandoffReceived)]
    assert order == [handoff("small")]


def test_a_node_sends_and_receives_at_the_same_time(world: World) -> None:
    first, second = world.pair(layout(tp_size=2), layout())
    connect(second, first)
    low, high = range(32), range(32, 64)
    there, there_table = transfer(first, second, "there", 400, ours=low, theirs=high)
    back, back_table = transfer(second, first, "back", 390, ours=low, theirs=high)
    second.wait(HandoffReceived, handoff("there"))
    first.wait(HandoffReceived, handoff("back"))
    assert second.holds(there, there_table)
    assert first.holds(back, back_table)
