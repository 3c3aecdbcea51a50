"""Pieces in and out of a cache, against a plain loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.pieces import TORCH_DTYPES, DevicePieces, HostPieces, open_pieces
from kv_transfer.reshard import PieceGrid
from pdserve.core.errors import InternalError
from pdserve.core.kv_layout import BlockId, KvLayout


def make_cache(layout: KvLayout, num_blocks: int, padding: int, seed: int = 0) -> torch.Tensor:
    """``[N, Hkv, L, 2, B, D]`` of random bytes, ``padding`` elements between two blocks."""
    dtype = TORCH_DTYPES[layout.dtype]
    size = int(np.prod(layout.block_shape))
    generator = torch.Generator().manual_seed(seed)
    store = torch.randint(-99, 99, (num_blocks, size + padding), generator=generator).to(dtype)
    return store[:, :size].view(num_blocks, *layout.block_shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvLayout, int, int, list[BlockId], range, range]:
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


@pytest.mark.parametrize("kind", [HostPieces, DevicePieces])
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_gathered_pieces_are_the_tokens_one_by_one(
    kind: type[HostPieces] | type[DevicePieces],
    case: tuple[KvLayout, int, int, list[BlockId], range, range],
) -> None:
    layout, unit, padding, blocks, pieces, heads = case
    kv = make_cache(layout, 8, padding)
    payload = torch.as_tensor(kind(kv).gather(blocks, pieces, heads, unit=unit)).view(kv.dtype)
    got = payload.view(len(pieces), len(heads), layout.num_layers, 2, unit, layout.head_size)
    grid = PieceGrid(unit, layout.block_size)
    for at, piece in enumerate(pieces):
        index, offset = grid.locate(piece)
        tokens = kv[blocks[index], heads.start : heads.stop, :, :, offset : offset + unit]
        assert torch.equal(got[at], tokens)


@pytest.mark.parametrize("kind", [HostPieces, DevicePieces])
@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_scattered_pieces_land_where_they_were_gathered_and_nowhere_else(
    kind: type[HostPieces] | type[DevicePieces],
    case: tuple[KvLayout, int, int, list[BlockId], range, range],
) -> None:
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
    payload = kind(source).gather(blocks, pieces, heads, unit=unit)
    kind(target).scatter(payload, blocks, pieces, heads, unit=unit)
    assert torch.equal(target, expected)


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
