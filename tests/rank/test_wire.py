"""Every message survives the wire, and what is no message is refused by name."""

from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from typing import get_args, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_transfer.commands import KvCommand, KvEvent
from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import PromptLogprob, SamplingParams, TokenLogprobs
from pdserve.engine.batch import (
    Batch,
    BlockCopy,
    Carried,
    Chunk,
    Joined,
    Sampled,
    Scored,
    Slot,
    StepOutput,
)
from pdserve.rank.codec import Cursor, codec_of
from pdserve.rank.messages import Pulse, RankFailed, RankReady, Stop
from pdserve.rank.wire import decode, encode
from tests.rank.messages import batches, messages, outputs, rare


def blocks(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, numbers))


FULL_BATCH = Batch(
    step=3,
    joined=(
        Joined(
            slot=Slot(1),
            sampling=SamplingParams(max_tokens=4, top_k=None, logprobs=0, seed=2**63 - 1),
            choices=(0, 2),
            end_token_ids=(2,),
            prompt_len=3,
            history=(5, 6, 7),
            blocks=blocks(9),
        ),
    ),
    left=(Slot(4),),
    copies=(BlockCopy(source=BlockId(1), destination=BlockId(2)),),
    chunks=(
        Chunk(slot=Slot(1), start=0, tokens=(5, 6, 7), new_blocks=blocks(10, 11), num_samples=2),
        Chunk(slot=Slot(2), start=8, tokens=Carried(), new_blocks=(), num_samples=1),
        Chunk(slot=Slot(3), start=0, tokens=(), new_blocks=blocks(12), num_samples=0),
    ),
)
FULL_OUTPUT = StepOutput(
    step=3,
    sampled=(
        Sampled(
            tokens=(1, 2), logprobs=(TokenLogprobs(logprob=-0.5, top=((1, -0.5), (9, -1.25))),)
        ),
        Sampled(tokens=()),
        Sampled(tokens=(3,), logprobs=(TokenLogprobs(logprob=float("-inf")),)),
    ),
    scored=(
        Scored(
            chunk=0,
            start=1,
            logprobs=(
                PromptLogprob(logprob=-0.5, rank=1, top=((5, -0.5), (9, -1.25))),
                PromptLogprob(logprob=float("-inf"), rank=64),
            ),
        ),
        Scored(chunk=2, start=8, logprobs=()),
    ),
)


@given(message=batches)
@example(message=FULL_BATCH)
def test_a_batch_comes_out_as_it_went_in(message):
    assert decode(encode(message)) == message


@given(message=outputs)
@example(message=FULL_OUTPUT)
def test_an_output_comes_out_as_it_went_in(message):
    assert decode(encode(message)) == message


@given(message=rare)
def test_every_other_message_comes_out_as_it_went_in(message):
    decoded = decode(encode(message))
    assert (type(decoded), decoded) == (type(message), message)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Batch, "step joined left copies chunks masks"),
        (Chunk, "slot start tokens new_blocks num_samples"),
        (BlockCopy, "source destination"),
        (StepOutput, "step sampled scored device_s"),
        (Scored, "chunk start logprobs"),
        (PromptLogprob, "logprob rank top"),
        (Sampled, "tokens logprobs"),
        (TokenLogprobs, "logprob top"),
    ],
)
def test_the_forms_written_by_hand_know_every_field(kind, names):
    assert " ".join(get_type_hints(kind)) == names


@given(message=messages, data=st.data())
def test_a_truncated_record_is_refused(message, data):
    record = encode(message)
    with pytest.raises(RankError, match="cannot be read"):
        decode(record[: data.draw(st.integers(0, len(record) - 1))])


@given(message=messages)
def test_a_record_with_bytes_behind_it_is_refused(message):
    with pytest.raises(RankError, match="cannot be read"):
        decode(encode(message) + b"\0")


@given(message=messages, data=st.data())
def test_a_damaged_record_is_read_as_another_or_refused(message, data):
    record = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RankError):
        decode(bytes(record))


@given(record=st.binary(max_size=200))
def test_noise_is_refused(record):
    with pytest.raises(RankError, match="cannot be read"):
        decode(record)


def test_a_length_beyond_the_record_is_refused_before_anything_is_read():
    record = bytearray(encode(FULL_BATCH))
    record[-8 * 4 :] = (2**62).to_bytes(8, "little") * 4
    with pytest.raises(RankError, match="cannot be read"):
        decode(bytes(record))


def test_a_record_of_other_code_is_refused():
    record = bytearray(encode(FULL_BATCH))
    record[1] ^= 1
    with pytest.raises(RankError, match="written by other code"):
        decode(bytes(record))


def test_two_types_with_the_same_fields_have_different_signatures():
    records = [encode(message) for message in (RankFailed(rank=0, kind="", message=""), Stop())]
    kinds = (*get_args(KvCommand), *get_args(KvEvent), RankReady, Pulse, RankFailed, Stop)
    assert all(is_dataclass(kind) for kind in kinds)
    assert len({codec_of(kind).signature for kind in kinds}) == len(kinds)
    assert len({record[:3] for record in records}) == len(records)


def test_a_message_with_surrogates_is_still_told():
    failed = RankFailed(rank=0, kind="rank_error", message="no file \udcff")
    assert decode(encode(failed)) == RankFailed(
        rank=0, kind="rank_error", message="no file \\udcff"
    )


@dataclass(frozen=True)
class _Unknown:
    value: complex


def test_a_type_without_a_binary_form_is_named():
    with pytest.raises(TypeError, match="complex"):
        codec_of(_Unknown)


@given(values=st.lists(st.tuples(st.booleans(), st.none() | st.floats(allow_nan=False))))
def test_nested_tuples_and_optionals_have_a_form(values):
    codec = codec_of(tuple[tuple[bool, float | None], ...])
    out = bytearray()
    codec.encode(tuple(values), out)
    assert codec.decode(Cursor(bytes(out))) == tuple(values)
