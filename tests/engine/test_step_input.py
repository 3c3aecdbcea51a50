"""A step's numbers say the same of its tokens whether it is filled up or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.batch import Carried, Chunk, Slot
from pdserve.engine.step_graphs import (
    StepGraphs,
    chunk_shapes,
    chunk_sizes,
    decode_shapes,
    decode_sizes,
)
from pdserve.engine.step_input import NewBlocks, StepInput, StepShape, pack, shape_of
from tests.engine.runs import chunk

SPARE = Slot(99)
SPARE_ENTRY = NewBlocks(places=[990], blocks=[77])
NOTHING_NEW = NewBlocks(places=[], blocks=[])


def step_input(chunks: list[Chunk], new: NewBlocks, shape: StepShape) -> StepInput:
    values = pack(chunks, new, shape, spare=SPARE, spare_entry=SPARE_ENTRY)
    assert len(values) == shape.num_values
    return StepInput.named(torch.tensor(values), shape)


@st.composite
def steps(draw: st.DrawFn) -> list[Chunk]:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    chunks = []
    for slot, length in enumerate(lengths):
        carried = length == 1 and draw(st.booleans())
        tokens = Carried() if carried else tuple(range(100 * slot, 100 * slot + length))
        samples = int(carried or draw(st.booleans()))
        start = draw(st.integers(0, 50))
        chunks.append(chunk(slot, start, ())._replace(tokens=tokens, num_samples=samples))
    return chunks


@given(chunks=steps(), more_tokens=st.integers(0, 40), more=st.integers(1, 4))
def test_what_fills_a_step_up_belongs_to_the_spare_slot(
    chunks: list[Chunk], more_tokens: int, more: int
) -> None:
    exact = shape_of(chunks, NOTHING_NEW)
    filled = StepShape(
        num_tokens=exact.num_tokens + more_tokens + more + 1,  # never as many as chunks
        num_chunks=exact.num_chunks + more,
        num_new_blocks=3,
    )
    plain, full = step_input(chunks, NOTHING_NEW, exact), step_input(chunks, NOTHING_NEW, filled)
    owners, owners_full = plain.owners(), full.owners()
    num_tokens, num_chunks = exact.num_tokens, exact.num_chunks
    assert owners.tolist() == [row for row, c in enumerate(chunks) for _ in range(c.length)]
    expected = [p for c in chunks for p in range(c.start, c.start + c.length)]
    assert plain.positions(owners).tolist() == expected
    assert full.positions(owners_full)[:num_tokens].tolist() == expected
    assert torch.equal(owners_full[:num_tokens], owners)
    assert set(owners_full[num_tokens:].tolist()) == {num_chunks}
    assert full.slots[num_chunks:].tolist() == full.keep_in[num_chunks:].tolist() == [SPARE] * more
    positions = full.positions(owners_full)[num_tokens:]
    assert positions.tolist() == list(range(more_tokens + more + 1))
    assert (
        full.lengths().tolist()
        == [*[c.length for c in chunks], len(positions), *[0] * more][: filled.num_chunks]
    )
    assert full.places.tolist() == SPARE_ENTRY.places * 3


def test_a_carried_token_names_its_slot_and_a_chunk_that_samples_nothing_keeps_nothing() -> None:
    chunks = [chunk(4, 7, Carried()), chunk(0, 3, [5, 6], num_samples=0)]
    new = NewBlocks(places=[41], blocks=[12])
    step = step_input(chunks, new, shape_of(chunks, new))
    assert step.tokens.tolist() == [-5, 5, 6]
    assert step.keep_in.tolist() == [4, SPARE]
    assert (step.places.tolist(), step.blocks.tolist()) == ([41], [12])


@given(num_seqs=st.integers(1, 40), filled=st.integers(0, 9))
def test_decode_steps_are_filled_up_with_sequences(num_seqs: int, filled: int) -> None:
    chunks = [chunk(slot, 5 + slot, Carried()) for slot in range(num_seqs)]
    size = num_seqs + filled
    shape = StepShape(num_tokens=size, num_chunks=size, num_new_blocks=size)
    step = step_input(chunks, NOTHING_NEW, shape)
    assert step.owners().tolist() == list(range(size))
    assert step.positions(step.owners()).tolist() == step.starts.tolist()
    assert step.starts.tolist() == [*range(5, 5 + num_seqs), *[0] * filled]


@pytest.mark.parametrize(("most", "longest"), [(1, 8), (2, 64), (8, 128), (64, 4096), (300, 300)])
def test_every_small_step_finds_the_smallest_graph_that_holds_it(most: int, longest: int) -> None:
    shapes = decode_shapes(most) + chunk_shapes(most, longest, 2e8)
    assert len(set(shapes)) == len(shapes)
    graphs = StepGraphs(
        lambda *_: torch.empty(0),
        lambda *_: None,
        shapes,
        vocab_size=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert graphs.shape_for(StepShape(num_tokens=1, num_chunks=1, num_new_blocks=0)) is None
    graphs._graphs = dict.fromkeys(shapes)  # type: ignore[assignment]
    for num_chunks in range(1, most + 1):
        decode = StepShape(num_tokens=num_chunks, num_chunks=num_chunks, num_new_blocks=0)
        found = graphs.shape_for(decode)
        assert found is not None
        assert found.num_chunks == min(s for s in decode_sizes(most) if s >= num_chunks)
        for num_tokens in (num_chunks + 1, 63, 64, 65, 512, 513, 1025):
            if num_tokens <= num_chunks:
                continue
            step = StepShape(num_tokens=num_tokens, num_chunks=num_chunks, num_new_blocks=0)
            found = graphs.shape_for(step)
            fits = [s for s in shapes if s.num_tokens >= num_tokens and s.num_chunks > num_chunks]
            fits = [s for s in fits if not s.has_single_tokens]
            assert found == min(fits, key=lambda s: (s.num_tokens, s.num_chunks), default=None)


@pytest.mark.parametrize("most", [1, 2, 5, 8, 21, 64, 100, 256, 300])
def test_sizes_ascend_to_the_largest_batch(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most


LLAMA_8B = 218_103_808  # weights of a layer
QWEN_600M = 15_728_640


@pytest.mark.parametrize(
    ("weights", "most", "sizes"),
    [
        (LLAMA_8B, 8192, [64, 128, 256, 512, 768, 1024]),
        (LLAMA_8B / 2, 8192, [64, 128, 256, 512, 768, 1024, 1536, 2048]),
        (LLAMA_8B, 600, [64, 128, 256, 512, 600]),
        (QWEN_600M, 8448, [64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 8448]),
        (QWEN_600M, 64, [64]),
        (QWEN_600M, 2, [2]),
        (QWEN_600M, 1, []),
        (1e12, 8192, [64]),
    ],
)
def test_graphs_of_chunks_go_as_far_as_launching_takes_longer(
    weights: float, most: int, sizes: list[int]
) -> None:
    assert chunk_sizes(most, weights) == sizes
    assert {shape.num_tokens for shape in chunk_shapes(8, most, weights)} == set(sizes)
