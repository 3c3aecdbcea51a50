"""Resharding against a dense model: every (head, token) comes once, from the right place."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.reshard import (
    HeadSlice,
    PieceGrid,
    check_compatible,
    exchange_unit,
    head_slices,
)
from pdserve.core.errors import HandshakeError
from pdserve.core.kv_layout import KvLayout


def layout(
    tp_size: int,
    block_size: int = 16,
    num_kv_heads: int = 8,
    *,
    dtype: str = "float32",
    num_layers: int = 2,
    head_size: int = 4,
) -> KvLayout:
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
        tp_size=tp_size,
    )


def tp_sizes(num_kv_heads: int) -> list[int]:
    return [tp for tp in range(1, 9) if not max(tp, num_kv_heads) % min(tp, num_kv_heads)]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    heads = draw(st.integers(1, 16))
    tps = st.sampled_from(tp_sizes(heads))
    blocks = st.integers(1, 48)
    return layout(draw(tps), draw(blocks), heads), layout(draw(tps), draw(blocks), heads)


def dense(kv: KvLayout, num_tokens: int) -> np.ndarray:
    """``[ranks, block-table entries, Hkv, B]`` of (model head, token) codes; −1 is no token."""
    tokens = np.arange(kv.num_blocks_for(num_tokens) * kv.block_size)
    blocks = np.where(tokens < num_tokens, tokens, -1).reshape(-1, 1, kv.block_size)
    heads = np.array([list(kv.heads_of(rank)) for rank in range(kv.tp_size)])[:, None, :, None]
    return np.where(blocks < 0, -1, heads * 1_000_000 + blocks)


@given(pair=pairs(), num_tokens=st.integers(1, 300))
@settings(max_examples=150)
def test_every_head_and_token_of_a_receiver_is_written_once_from_the_right_source(
    pair: tuple[KvLayout, KvLayout], num_tokens: int
) -> None:
    sender, receiver = pair
    unit = exchange_unit(sender, receiver)
    from_grid, to_grid = PieceGrid(unit, sender.block_size), PieceGrid(unit, receiver.block_size)
    source, wanted = dense(sender, num_tokens), dense(receiver, num_tokens)
    got, writes = np.full_like(wanted, -1), np.zeros_like(wanted)
    for part in head_slices(sender, receiver):
        for piece in range(from_grid.num_pieces(num_tokens)):
            from_block, from_offset = from_grid.locate(piece)
            to_block, to_offset = to_grid.locate(piece)
            data = source[part.sender_rank, from_block][
                _as_slice(part.sender_heads), from_offset : from_offset + unit
            ]
            target = (part.receiver_rank, to_block, _as_slice(part.receiver_heads))
            got[target][:, to_offset : to_offset + unit] = data
            writes[target][:, to_offset : to_offset + unit] += 1
    assert (got == wanted).all()
    assert (writes[wanted >= 0] == 1).all()
    assert writes.max() <= 1


@pytest.mark.parametrize("num_kv_heads", range(1, 9))
def test_for_all_tp_pairs_each_receiver_head_has_one_source_that_holds_it(
    num_kv_heads: int,
) -> None:
    for from_tp in tp_sizes(num_kv_heads):
        for to_tp in tp_sizes(num_kv_heads):
            sender = layout(from_tp, num_kv_heads=num_kv_heads)
            receiver = layout(to_tp, num_kv_heads=num_kv_heads)
            served = []
            for part in head_slices(sender, receiver):
                sent = _model_heads(sender, part.sender_rank, part.sender_heads)
                assert sent == _model_heads(receiver, part.receiver_rank, part.receiver_heads)
                served += [(part.receiver_rank, head) for head in sent]
            wanted = [(rank, head) for rank in range(to_tp) for head in receiver.heads_of(rank)]
            assert sorted(served) == wanted


@given(pair=pairs())
def test_a_pair_of_ranks_exchanges_at_most_one_slice(pair: tuple[KvLayout, KvLayout]) -> None:
    ranks = [(part.sender_rank, part.receiver_rank) for part in head_slices(*pair)]
    assert len(ranks) == len(set(ranks))


@given(pair=pairs())
def test_replicas_of_a_head_serve_equally_many_receivers_give_or_take_one(
    pair: tuple[KvLayout, KvLayout],
) -> None:
    sender, receiver = pair
    served: dict[int, dict[int, int]] = {}
    for rank in range(sender.tp_size):
        for head in sender.heads_of(rank):
            served.setdefault(head, {})[rank] = 0
    for part in head_slices(sender, receiver):
        for head in _model_heads(sender, part.sender_rank, part.sender_heads):
            served[head][part.sender_rank] += 1
    for counts in served.values():
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_equal_layouts_move_whole_ranks_one_to_one(tp_size: int) -> None:
    kv = layout(tp_size, num_kv_heads=2)
    heads = range(kv.heads_per_rank)
    assert head_slices(kv, kv) == tuple(
        HeadSlice(sender_rank=rank, receiver_rank=rank, sender_heads=heads, receiver_heads=heads)
        for rank in range(tp_size)
    )


@given(st.integers(1, 512), st.integers(1, 512))
def test_a_piece_lies_within_one_block_on_both_sides(ours: int, theirs: int) -> None:
    unit = exchange_unit(layout(1, ours), layout(1, theirs))
    assert unit == gcd(ours, theirs)
    for block_size in (ours, theirs):
        grid = PieceGrid(unit, block_size)
        for piece in (0, 1, grid.pieces_per_block, 1000):
            index, offset = grid.locate(piece)
            assert index * block_size + offset == piece * unit
            assert offset + unit <= block_size


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("dtype", layout(1, dtype="bfloat16")),
        ("num_layers", layout(1, num_layers=3)),
        ("num_kv_heads", layout(1, num_kv_heads=4)),
        ("head_size", layout(1, head_size=8)),
    ],
)
def test_what_no_resharding_bridges_is_refused_by_field_with_a_cure(
    field: str, other: KvLayout
) -> None:
    with pytest.raises(HandshakeError, match=rf"handshake: {field} differs: here .*; (set|serve) "):
        check_compatible(layout(1), other)


def test_other_tp_and_block_sizes_are_no_mismatch() -> None:
    check_compatible(layout(1, 16), layout(8, 48))


def _as_slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _model_heads(kv: KvLayout, rank: int, local: range) -> list[int]:
    return [kv.heads_of(rank)[index] for index in local]
