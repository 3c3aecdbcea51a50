"""Copies of pieces in a GPU's memory, by kernel and by copy engines, against the same ones in host
memory.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.pieces import HostPieces, open_pieces
from pdserve.core.errors import InternalError
from pdserve.core.kv_layout import BlockId, KvLayout
from tests.kv_transfer.test_pieces import borrow, make_cache

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")
NUM_BLOCKS = 12
MAX_ITEMS = 4096  # of one launch
UNITS, HEAD_BYTES = (1, 4, 6), (16, 256)  # each pair compiles a kernel
HEAD_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KvLayout, int]:
    """And tokens of a piece."""
    unit, dtype = draw(st.sampled_from(UNITS)), draw(st.sampled_from(sorted(HEAD_SIZES)))
    layout = KvLayout(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 4)),
        head_size=draw(st.sampled_from(HEAD_BYTES)) // HEAD_SIZES[dtype],
        block_size=unit * draw(st.integers(1, 4)),
        dtype=dtype,
        tp_size=1,
    )
    return layout, unit


@st.composite
def places(draw: st.DrawFn, layout: KvLayout, unit: int) -> tuple[list[BlockId], range, range]:
    """Blocks, pieces of them, heads."""
    blocks = draw(st.permutations(range(NUM_BLOCKS)))[: draw(st.integers(1, NUM_BLOCKS))]
    num_pieces = len(blocks) * layout.block_size // unit
    first = draw(st.integers(0, num_pieces - 1))
    pieces = range(first, draw(st.integers(first + 1, num_pieces)))
    head = draw(st.integers(0, layout.num_kv_heads - 1))
    heads = range(head, draw(st.integers(head + 1, layout.num_kv_heads)))
    return [BlockId(block) for block in blocks], pieces, heads


def on_both(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache in host memory and on the GPU, with the same strides."""
    store = kv.new_empty(kv.stride(0) * kv.shape[0]).fill_(7)
    here, there = store.clone(), store.to(GPU)
    views = [memory.as_strided(kv.shape, kv.stride()) for memory in (here, there)]
    for view in views:
        view.copy_(kv)
    torch.cuda.synchronize()
    return views[0], views[1]


@given(drawn=layouts(), data=st.data())
@settings(max_examples=40)
def test_pieces_go_out_and_in_as_in_host_memory(
    drawn: tuple[KvLayout, int], data: st.DataObject
) -> None:
    layout, unit = drawn
    blocks, pieces, heads = data.draw(places(layout, unit))
    here, there = on_both(make_cache(layout, NUM_BLOCKS, 16, 1))
    expected = HostPieces(here).gather(blocks, pieces, heads, unit=unit)
    on_device = open_pieces(there, layout)
    payload = on_device.gather(blocks, pieces, heads, unit=unit)
    assert isinstance(payload, torch.Tensor)
    assert (on_device.in_host_memory(payload) == expected).all()
    into, onto = on_both(make_cache(layout, NUM_BLOCKS, 16, 2))
    HostPieces(into).scatter(expected, blocks, pieces, heads, unit=unit)
    open_pieces(onto, layout).scatter(payload, blocks, pieces, heads, unit=unit).wait()
    assert torch.equal(onto.cpu(), into)


@given(drawn=layouts(), data=st.data())
@settings(max_examples=40)
def test_lent_pieces_of_other_blocks_are_copied_as_in_host_memory(
    drawn: tuple[KvLayout, int], data: st.DataObject
) -> None:
    layout, unit = drawn
    blocks, pieces, heads = data.draw(places(layout, unit))
    per_block = data.draw(st.integers(1, 4))
    theirs = KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        block_size=unit * per_block,
        dtype=layout.dtype,
        tp_size=1,
    )
    first = data.draw(st.integers(0, per_block - 1))
    count = -(-(first + len(pieces)) // per_block)
    table = tuple(map(BlockId, data.draw(st.permutations(range(60)))[:count]))
    head = data.draw(st.integers(0, layout.num_kv_heads - len(heads)))
    source_here, source_there = on_both(make_cache(theirs, 60, 16, 3))
    into, onto = on_both(make_cache(layout, NUM_BLOCKS, 16, 4))
    HostPieces(into).scatter(
        borrow(source_here, table, first, head), blocks, pieces, heads, unit=unit
    )
    open_pieces(onto, layout).scatter(
        borrow(source_there, table, first, head), blocks, pieces, heads, unit=unit
    ).wait()
    assert torch.equal(onto.cpu(), into)


@given(
    data=st.data(),
    padding=st.sampled_from([0, 16]),
    is_in_order=st.booleans(),
    count=st.integers(1, 100),
)
@settings(max_examples=40)
def test_whole_blocks_come_by_the_copy_engines_neighbours_in_one_go(
    data: st.DataObject, padding: int, is_in_order: bool, count: int
) -> None:
    layout = KvLayout(
        num_layers=2, num_kv_heads=3, head_size=8, block_size=4, dtype="bfloat16", tp_size=1
    )
    heads = data.draw(st.sampled_from([range(3), range(1, 3)]))
    table = [BlockId(block) for block in range(count)]
    lent = tuple(table) if is_in_order else tuple(data.draw(st.permutations(table)))
    source_here, source_there = on_both(make_cache(layout, 100, padding, 5))
    into, onto = on_both(make_cache(layout, 100, padding, 6))
    for kv, cache in ((into, source_here), (onto, source_there)):
        borrowed = borrow(cache, lent, 0, heads.start)
        open_pieces(kv, layout).scatter(borrowed, table, range(count), heads, unit=4).wait()
    assert torch.equal(onto.cpu(), into)


def test_payloads_from_host_memory_are_taken_too() -> None:
    layout = KvLayout(
        num_layers=2, num_kv_heads=2, head_size=64, block_size=4, dtype="bfloat16", tp_size=1
    )
    here, there = on_both(make_cache(layout, NUM_BLOCKS, 16))
    blocks, pieces, heads = [BlockId(3), BlockId(1)], range(2), range(2)
    payload = HostPieces(here).gather(blocks, pieces, heads, unit=4)
    there.fill_(0)
    torch.cuda.synchronize()
    open_pieces(there, layout).scatter(payload, blocks, pieces, heads, unit=4).wait()
    assert torch.equal(there[[3, 1]].cpu(), here[[3, 1]])


def test_blocks_beyond_two_to_the_31_elements_and_more_pieces_than_one_launch_takes() -> None:
    num_blocks, elements = MAX_ITEMS + 300, 1 << 19
    store = torch.empty(num_blocks, elements, dtype=torch.bfloat16, device=GPU)
    assert store.numel() > 1 << 31
    store[:] = torch.arange(num_blocks, device=GPU)[:, None] % 251
    kv = store.view(num_blocks, 2, 16, 2, 64, 128)
    torch.cuda.synchronize()
    layout = KvLayout(
        num_layers=16, num_kv_heads=2, head_size=128, block_size=64, dtype="bfloat16", tp_size=1
    )
    pieces = open_pieces(kv, layout)
    table = [BlockId(block) for block in reversed(range(num_blocks))]
    lent = tuple(map(BlockId, range(num_blocks)))
    target = torch.zeros_like(store)
    torch.cuda.synchronize()
    open_pieces(target.view(kv.shape), layout).scatter(
        borrow(kv, lent, 0, 0), table, range(num_blocks), range(2), unit=64
    ).wait()
    assert torch.equal(target.flip(0), store)
    last = pieces.gather(table[:1], range(1), range(2), unit=64)
    assert isinstance(last, torch.Tensor)
    assert torch.equal(last.view(torch.bfloat16), store[-1])


def test_rows_that_are_no_whole_vectors_are_refused() -> None:
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_size=4, block_size=4, dtype="bfloat16", tp_size=1
    )
    with pytest.raises(InternalError, match="multiples of 16"):
        open_pieces(torch.zeros(2, *layout.block_shape, dtype=torch.bfloat16, device=GPU), layout)
