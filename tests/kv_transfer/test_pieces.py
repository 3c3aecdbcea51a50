"""Pieces in and out of a cache, against a plain loop over tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.payload import Borrowed, Lent, RemoteCache
from kv_transfer.pieces import TORCH_DTYPES, HostPieces, open_pieces
from kv_transfer.reshard import PieceGrid
from pdserve.core.errors import InternalError, TransferError
from pdserve.core.kv_layout import BlockId, KvLayout

Case = tuple[KvLayout, int, int, list[BlockId], range, range]


def make_cache(layout: KvLayout, num_blocks: int, padding: int, seed: int = 0) -> torch.Tensor:
    """``[N, Hkv, L, 2, B, D]`` of random bytes, ``padding`` elements between two blocks."""
    dtype = TORCH_DTYPES[layout.dtype]
    size = int(np.prod(layout.block_shape))
    generator = torch.Generator().manual_seed(seed)
    store = torch.randint(-99, 99, (num_blocks, size + padding), generator=generator).to(dtype)
    return store[:, :size].view(num_blocks, *layout.block_shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit, pieces_per_block = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    layout = KvLayout(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from([2, 4])),
        block_size=unit * pieces_per_block,
        dtype=draw(st.sampled_from(sorted(TORCH_DTYPES))),
        tp_size=1,
    )
    blocks = draw(st.permutations(range(8)))[: draw(st.integers(1, 8))]
    first = draw(st.integers(0, len(blocks) * pieces_per_block - 1))
    last = draw(st.integers(first + 1, len(blocks) * pieces_per_block))
    head = draw(st.integers(0, layout.num_kv_heads - 1))
    heads = range(head, draw(st.integers(head + 1, layout.num_kv_heads)))
    padding = draw(st.sampled_from([0, 8]))
    return layout, unit, padding, [BlockId(b) for b in blocks], range(first, last), heads


@given(case=cases())
@settings(max_examples=60)
def test_gathered_pieces_are_the_tokens_one_by_one(case: Case) -> None:
    layout, unit, padding, blocks, pieces, heads = case
    kv = make_cache(layout, 8, padding)
    payload = torch.as_tensor(HostPieces(kv).gather(blocks, pieces, heads, unit=unit))
    got = payload.view(kv.dtype).view(
        len(pieces), len(heads), layout.num_layers, 2, unit, layout.head_size
    )
    grid = PieceGrid(unit, layout.block_size)
    for at, piece in enumerate(pieces):
        index, offset = grid.locate(piece)
        tokens = kv[blocks[index], heads.start : heads.stop, :, :, offset : offset + unit]
        assert torch.equal(got[at], tokens)


@given(case=cases())
@settings(max_examples=60)
def test_scattered_pieces_land_where_they_were_gathered_and_nowhere_else(case: Case) -> None:
    layout, unit, padding, blocks, pieces, heads = case
    source, target = make_cache(layout, 8, padding, 1), make_cache(layout, 8, padding, 2)
    expected = target.clone()
    grid = PieceGrid(unit, layout.block_size)
    for piece in pieces:
        index, offset = grid.locate(piece)
        where = (
            blocks[index],
            slice(heads.start, heads.stop),
            slice(None),
            slice(None),
            slice(offset, offset + unit),
        )
        expected[where] = source[where]
    payload = HostPieces(source).gather(blocks, pieces, heads, unit=unit)
    HostPieces(target).scatter(payload, blocks, pieces, heads, unit=unit)
    assert torch.equal(target, expected)


@given(case=cases(), data=st.data())
@settings(max_examples=60)
def test_lent_pieces_arrive_as_if_they_had_been_gathered(case: Case, data: st.DataObject) -> None:
    layout, unit, padding, blocks, pieces, heads = case
    per_block = data.draw(st.integers(1, 4))
    theirs = replace(layout, block_size=unit * per_block)
    source, target = make_cache(theirs, 24, padding, 1), make_cache(layout, 8, padding, 2)
    first = data.draw(st.integers(0, per_block - 1))
    table = data.draw(st.permutations(range(24)))[: -(-(first + len(pieces)) // per_block)]
    their_blocks = tuple(map(BlockId, table))
    head = data.draw(st.integers(0, layout.num_kv_heads - len(heads)))
    borrowed = borrow(source, their_blocks, first, head)
    expected = target.clone()
    sent = range(first, first + len(pieces))
    payload = HostPieces(source).gather(
        their_blocks, sent, range(head, head + len(heads)), unit=unit
    )
    HostPieces(expected).scatter(payload, blocks, pieces, heads, unit=unit)
    HostPieces(target).scatter(borrowed, blocks, pieces, heads, unit=unit)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("table", "first", "head"),
    [((0, 3), 0, 0), ((0, 1), 0, 2), ((0, 1), 1, 0), ((0, 1), 2, 0), ((0,), 0, 0)],
)
def test_what_lies_outside_the_senders_cache_is_not_read(
    table: tuple[int, ...], first: int, head: int
) -> None:
    source, target = make_cache(LAYOUT, 3, 8, 1), make_cache(LAYOUT, 8, 8, 2)
    before = target.clone()
    borrowed = borrow(source, tuple(map(BlockId, table)), first, head)
    with pytest.raises(TransferError, match="are not lent"):
        HostPieces(target).scatter(borrowed, [BlockId(5), BlockId(6)], range(4), range(1), unit=2)
    assert torch.equal(target, before)


def borrow(source: torch.Tensor, blocks: tuple[BlockId, ...], first: int, head: int) -> Borrowed:
    return Borrowed(
        lent=Lent(blocks=blocks, first_piece=first, first_head=head, num_bytes=0),
        cache=RemoteCache(
            address=source.data_ptr(),
            num_blocks=source.shape[0],
            num_heads=source.shape[1],
            block_size=source.shape[4],
            block_stride_bytes=source.stride(0) * source.element_size(),
        ),
        check_valid=lambda: None,
    )


LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=2, head_size=4, block_size=4, dtype="bfloat16", tp_size=1
)


@pytest.mark.parametrize(
    ("kv", "problem"),
    [
        (
            torch.zeros(3, 2, 2, 2, 4, 4),
            r"expected torch.bfloat16 \[N, 2, 2, 2, 4, 4\], got torch.f",
        ),
        (
            torch.zeros(3, 2, 2, 2, 5, 4, dtype=torch.bfloat16),
            r"got torch.bfloat16 \[3, 2, 2, 2, 5",
        ),
        (
            torch.zeros(3, 2, 2, 2, 4, 4, dtype=torch.bfloat16).transpose(3, 2),
            "a block must be one contiguous run",
        ),
    ],
)
def test_a_cache_that_is_not_as_the_layout_says_is_refused(kv: torch.Tensor, problem: str) -> None:
    with pytest.raises(InternalError, match=problem):
        open_pieces(kv, LAYOUT)
