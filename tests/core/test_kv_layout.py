"""Which rank holds which heads, and how large a block is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import BLOCK_ALIGNMENT_BYTES, DTYPE_BYTES, KvLayout


def make_layout(**changes: int | str) -> KvLayout:
    settings = {
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_size": 64,
        "block_size": 16,
        "dtype": "float32",
        "tp_size": 1,
    }
    return KvLayout(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "heads"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (8, 8, [range(i, i + 1) for i in range(8)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 3, [range(1)] * 3),
        (3, 3, [range(1), range(1, 2), range(2, 3)]),
    ],
)
def test_heads_are_dealt_out_in_order_and_shared_where_ranks_are_more(
    num_kv_heads: int, tp_size: int, heads: list[range]
):
    layout = make_layout(num_kv_heads=num_kv_heads, tp_size=tp_size)
    assert [layout.heads_of(rank) for rank in range(tp_size)] == heads
    assert {len(held) for held in heads} == {layout.heads_per_rank}


@given(heads=st.integers(1, 16), factor=st.integers(1, 4), more_ranks=st.booleans())
def test_every_head_is_held_by_equally_many_ranks(heads: int, factor: int, more_ranks: bool):
    num_kv_heads, tp_size = (heads, heads * factor) if more_ranks else (heads * factor, heads)
    layout = make_layout(num_kv_heads=num_kv_heads, tp_size=tp_size)
    held = [head for rank in range(tp_size) for head in layout.heads_of(rank)]
    copies = max(1, tp_size // num_kv_heads)
    assert sorted(held) == sorted([*range(num_kv_heads)] * copies)
    assert held == sorted(held)


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(3, 2), (2, 3), (8, 6), (4, 6)])
def test_heads_that_can_not_be_dealt_out_evenly_are_refused_with_the_cure(
    num_kv_heads: int, tp_size: int
):
    with pytest.raises(ConfigError) as error:
        make_layout(num_kv_heads=num_kv_heads, tp_size=tp_size)
    assert str(error.value) == (
        f"tensor_parallel_size: {tp_size} ranks cannot share {num_kv_heads} KV heads evenly; "
        f"use a divisor or a multiple of {num_kv_heads}"
    )


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"kv_cache.dtype: 'fp8' is not one of \['bfloat16'"):
        make_layout(dtype="fp8")


def test_a_block_is_as_large_as_its_shape():
    layout = make_layout()
    assert layout.block_shape == (3, 30, 2, 16, 64)
    assert layout.block_bytes == 3 * 30 * 2 * 16 * 64 * 4
    assert layout.token_bytes == layout.block_bytes // 16
    assert make_layout(tp_size=3).block_shape == (1, 30, 2, 16, 64)
    assert make_layout(tp_size=6).block_bytes == layout.block_bytes // 3


@given(
    num_layers=st.integers(1, 40),
    head_size=st.integers(1, 256),
    block_size=st.integers(1, 64),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)
def test_blocks_start_on_borders_and_waste_less_than_one(
    num_layers: int, head_size: int, block_size: int, dtype: str
):
    layout = make_layout(
        num_layers=num_layers, head_size=head_size, block_size=block_size, dtype=dtype
    )
    assert layout.block_stride_bytes % BLOCK_ALIGNMENT_BYTES == 0
    assert 0 <= layout.block_stride_bytes - layout.block_bytes < BLOCK_ALIGNMENT_BYTES


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_tokens_need_whole_blocks(num_tokens: int, num_blocks: int):
    assert make_layout().num_blocks_for(num_tokens) == num_blocks
