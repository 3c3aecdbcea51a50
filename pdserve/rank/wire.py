"""The records that go over the rings: one byte of type, two bytes of signature, then the value.

Batch and StepOutput travel once a step and are laid out in columns; everything else has the form
that ``codec.py`` derives from its class. The signature is a checksum of the type's binary form, so
that a record of other code is refused. Whatever is no record raises RankError; nothing is read past
its end.
"""

import struct
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar, get_args, get_type_hints

from kv_transfer.commands import KvCommand, KvEvent
from pdserve.core.errors import ConfigError, RankError
from pdserve.core.kv_layout import BlockId
from pdserve.core.request import PromptLogprob, TokenLogprobs
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
    TokenMask,
)
from pdserve.rank.codec import Codec, Cursor, codec_of, pack_floats, pack_ints
from pdserve.rank.messages import Pulse, RankFailed, RankReady, Stop

Message = Batch | StepOutput | KvCommand | KvEvent | RankReady | Pulse | RankFailed | Stop

T = TypeVar("T")

_CARRIED = Carried()
_CARRIED_LENGTH = -1  # in the column of token counts
_PREFIX = struct.Struct("<BH")


def encode(message: Message) -> bytes:
    """The record of a message."""
    prefix, codec = _ENCODERS[type(message)]
    out = bytearray(prefix)
    codec.encode(message, out)
    return bytes(out)


def decode(record: bytes) -> Message:
    """The message of a record. Raises RankError if it is none."""
    try:
        number, signature = _PREFIX.unpack_from(record)
        expected, codec = _DECODERS[number]
        if signature != expected:
            raise ValueError("written by other code")
        cursor = Cursor(record, _PREFIX.size)
        message: Message = codec.decode(cursor)
        cursor.end()
    except (struct.error, ValueError, LookupError, ArithmeticError, ConfigError) as error:
        raise RankError(
            f"a ring record of {len(record)} bytes cannot be read: {error!r}"
        ) from error
    return message


def _encode_batch(batch: Batch, out: bytearray) -> None:
    chunks = batch.chunks
    runs = [() if isinstance(chunk.tokens, Carried) else chunk.tokens for chunk in chunks]
    blocks = [chunk.new_blocks for chunk in chunks]
    lengths = [
        _CARRIED_LENGTH if isinstance(chunk.tokens, Carried) else len(chunk.tokens)
        for chunk in chunks
    ]
    out += pack_ints(
        [
            *(batch.step, len(batch.joined), len(batch.left), len(batch.copies), len(chunks)),
            len(batch.masks),
            *batch.left,
            *[copy.source for copy in batch.copies],
            *[copy.destination for copy in batch.copies],
            *[chunk.slot for chunk in chunks],
            *[chunk.start for chunk in chunks],
            *[chunk.num_samples for chunk in chunks],
            *lengths,
            *map(len, blocks),
            *chain.from_iterable(runs),
            *chain.from_iterable(blocks),
        ]
    )
    for joined in batch.joined:
        _JOINED.encode(joined, out)
    for mask in batch.masks:
        _MASK.encode(mask, out)


def _decode_batch(cursor: Cursor) -> Batch:
    step, num_joined, num_left, num_copies, num_chunks, num_masks = cursor.ints(6)
    left, sources, destinations = (cursor.ints(n) for n in (num_left, num_copies, num_copies))
    slots, starts, samples, lengths, num_blocks = (cursor.ints(num_chunks) for _ in range(5))
    runs = _runs(cursor, [0 if length == _CARRIED_LENGTH else length for length in lengths])
    tokens = [
        _CARRIED if length == _CARRIED_LENGTH else run
        for length, run in zip(lengths, runs, strict=True)
    ]
    blocks = _runs(cursor, num_blocks)
    return Batch(
        step=step,
        left=tuple(map(Slot, left)),
        copies=tuple(
            BlockCopy(source=BlockId(source), destination=BlockId(destination))
            for source, destination in zip(sources, destinations, strict=True)
        ),
        chunks=tuple(map(Chunk._make, zip(slots, starts, tokens, blocks, samples, strict=True))),
        joined=tuple([_JOINED.decode(cursor) for _ in range(num_joined)]),
        masks=tuple([_MASK.decode(cursor) for _ in range(num_masks)]),
    )


def _encode_output(output: StepOutput, out: bytearray) -> None:
    sampled = output.sampled
    logprobs = list(chain.from_iterable([each.logprobs for each in sampled]))
    tops = list(chain.from_iterable([each.top for each in logprobs]))
    out += pack_ints(
        [
            *(output.step, len(sampled), len(logprobs)),
            *[len(each.tokens) for each in sampled],
            *[len(each.logprobs) for each in sampled],
            *[len(each.top) for each in logprobs],
            *chain.from_iterable([each.tokens for each in sampled]),
            *[token for token, _ in tops],
        ]
    )
    out += pack_floats([*[each.logprob for each in logprobs], *[value for _, value in tops]])
    _encode_scored(output.scored, out)
    _SECONDS.encode(output.device_s, out)


def _decode_output(cursor: Cursor) -> StepOutput:
    step, num_sampled, num_logprobs = cursor.ints(3)
    num_tokens, logprob_counts = cursor.ints(num_sampled), cursor.ints(num_sampled)
    num_tops = cursor.ints(num_logprobs)
    tokens = _runs(cursor, num_tokens)
    top_tokens = cursor.ints(sum(num_tops))
    values = cursor.floats(num_logprobs)
    tops = tuple(zip(top_tokens, cursor.floats(len(top_tokens)), strict=True))
    logprobs = tuple(
        TokenLogprobs(logprob=value, top=top)
        for value, top in zip(values, _split(tops, num_tops), strict=True)
    )
    return StepOutput(
        step=step,
        sampled=tuple(
            [
                Sampled(run, each)
                for run, each in zip(tokens, _split(logprobs, logprob_counts), strict=True)
            ]
        ),
        scored=_decode_scored(cursor),
        device_s=_SECONDS.decode(cursor),
    )


def _encode_scored(scored: Sequence[Scored], out: bytearray) -> None:
    logprobs = list(chain.from_iterable([each.logprobs for each in scored]))
    tops = list(chain.from_iterable([each.top for each in logprobs]))
    out += pack_ints(
        [
            *(len(scored), len(logprobs)),
            *[each.chunk for each in scored],
            *[each.start for each in scored],
            *[len(each.logprobs) for each in scored],
            *[each.rank for each in logprobs],
            *[len(each.top) for each in logprobs],
            *[token for token, _ in tops],
        ]
    )
    out += pack_floats([*[each.logprob for each in logprobs], *[value for _, value in tops]])


def _decode_scored(cursor: Cursor) -> tuple[Scored, ...]:
    num_scored, num_logprobs = cursor.ints(2)
    chunks, starts, counts = (cursor.ints(num_scored) for _ in range(3))
    ranks, num_tops = cursor.ints(num_logprobs), cursor.ints(num_logprobs)
    top_tokens = cursor.ints(sum(num_tops))
    values = cursor.floats(num_logprobs)
    tops = tuple(zip(top_tokens, cursor.floats(len(top_tokens)), strict=True))
    logprobs = tuple(
        [
            PromptLogprob(logprob=value, rank=rank, top=top)
            for value, rank, top in zip(values, ranks, _split(tops, num_tops), strict=True)
        ]
    )
    return tuple(
        [
            Scored(chunk=chunk, start=start, logprobs=run)
            for chunk, start, run in zip(chunks, starts, _split(logprobs, counts), strict=True)
        ]
    )


def _runs(cursor: Cursor, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Integers that lie behind each other, cut into tuples of these lengths."""
    return _split(cursor.ints(sum(lengths)), lengths)


def _split(values: tuple[T, ...], lengths: Sequence[int]) -> list[tuple[T, ...]]:
    if not values and not any(lengths):  # of most columns
        return [()] * len(lengths)
    runs = []
    stop = 0
    for length in lengths:
        start, stop = stop, stop + length
        runs.append(values[start:stop])
    if min(lengths, default=0) < 0 or stop != len(values):
        raise ValueError(f"runs of {stop} for {len(values)} values")
    return runs


def _columns(*kinds: type) -> str:
    """The signature of a form that is written by hand: the classes and fields it knows."""
    return ";".join(f"{kind.__name__}:{list(get_type_hints(kind))}" for kind in kinds)


_JOINED = codec_of(Joined)
_MASK = codec_of(TokenMask)
_SECONDS = codec_of(float | None)

# The place in this table is the type's number on the wire.
_CODECS: tuple[tuple[type, Codec], ...] = (
    (
        Batch,
        Codec(
            _encode_batch,
            _decode_batch,
            _columns(Batch, Chunk, BlockCopy) + _JOINED.signature + _MASK.signature,
        ),
    ),
    (
        StepOutput,
        Codec(
            _encode_output,
            _decode_output,
            _columns(StepOutput, Sampled, TokenLogprobs, Scored, PromptLogprob),
        ),
    ),
    *(
        (kind, codec_of(kind))
        for kind in (*get_args(KvCommand), *get_args(KvEvent), RankReady, Pulse, RankFailed, Stop)
    ),
)
_SIGNATURES = [zlib.crc32(codec.signature.encode()) & 0xFFFF for _, codec in _CODECS]
_ENCODERS = {
    kind: (_PREFIX.pack(number, signature), codec)
    for number, ((kind, codec), signature) in enumerate(zip(_CODECS, _SIGNATURES, strict=True))
}
_DECODERS = [(signature, codec) for (_, codec), signature in zip(_CODECS, _SIGNATURES, strict=True)]
