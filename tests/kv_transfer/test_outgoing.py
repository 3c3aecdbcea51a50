"""How a handoff is cut into frames."""

from dataclasses import replace

import pytest

from kv_transfer.commands import PushTokens
from kv_transfer.frame_queue import LinkId
from kv_transfer.outgoing import FrameCutter, Outgoing
from kv_transfer.reshard import PieceGrid, cell_bytes, exchange_unit
from tests.kv_transfer.nodes import LAYOUT, blocks, handoff

NUM_TOKENS, FRAME_BYTES = 960, 1 << 18
LINK = LinkId("decode-0#1", 0)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (4, 4), (1, 1), (16, 4), (32, 8)])
def test_small_blocks_travel_in_frames_as_large_as_those_of_large_ones(
    ours: int, theirs: int
) -> None:
    sender, receiver = (replace(LAYOUT, block_size=size) for size in (ours, theirs))
    unit = exchange_unit(sender, receiver)
    push = PushTokens(
        handoff=handoff("a"),
        peer_id=LINK.peer_id,
        start=0,
        stop=NUM_TOKENS,
        blocks=blocks(*range(NUM_TOKENS // ours)),
        last=True,
    )
    num_heads = sender.heads_per_rank
    outgoing = Outgoing(
        push,
        {LINK: num_heads},
        grid=PieceGrid(unit, ours),
        cutter=FrameCutter(cell_bytes(sender, unit), FRAME_BYTES),
    )
    left = outgoing.push(push, num_blocks=NUM_TOKENS)[LINK]
    assert left == NUM_TOKENS * sender.token_bytes
    num_frames = 0
    while left:
        pieces, heads = outgoing.next_frame(LINK)
        left -= len(pieces) * len(heads) * cell_bytes(sender, unit)
        num_frames += 1
    assert num_frames == NUM_TOKENS * sender.token_bytes // FRAME_BYTES
