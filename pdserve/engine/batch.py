"""One step's work as plain data: a delta to what the ranks hold, and what comes back.

The front plans; every rank receives the same batch; ranks never decide. Of what a step has for each
sequence the classes are tuples: making one takes half as long. Prefill and decode differ only in
chunk length. Within a batch the order is: ``left`` slots are cleared, ``joined`` slots are
set up, ``copies`` are done, then all chunks run as one forward.
"""

from dataclasses import dataclass
from typing import NamedTuple, NewType

from pdserve.core.kv_layout import BlockId
from pdserve.core.request import PromptLogprob, SamplingParams, TokenLogprobs

Slot = NewType("Slot", int)


@dataclass(frozen=True, slots=True)
class Carried:
    """In place of a chunk's one token: what was sampled last for this slot, known here or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A sequence that the ranks have not held before this step, or hold again; the schedulers plan
    its first chunk in the same batch.

    ``history`` is filled only where ``sampling.needs_history``: the tokens so far, of which the
    first ``prompt_len`` are the prompt and the rest output. ``end_token_ids`` are masked until
    ``sampling.min_tokens`` output tokens exist. A chunk with ``num_samples`` n samples for
    ``choices[:n]``; a decoding sequence has one choice.
    """

    slot: Slot
    sampling: SamplingParams
    choices: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    prompt_len: int
    history: tuple[int, ...]
    blocks: tuple[BlockId, ...]


class Chunk(NamedTuple):
    """The next run of tokens of one sequence; a decode step is a chunk of one token.

    The chunk's KV is written at positions ``start ..``; it attends to everything before it. If
    ``num_samples`` > 0 the token after the chunk's last position is sampled, once for each choice.
    """

    slot: Slot
    start: int  # position of the first token; KV for [0, start) is already cached
    tokens: tuple[int, ...] | Carried
    new_blocks: tuple[BlockId, ...]  # appended to the slot's block table
    num_samples: int

    @property
    def length(self) -> int:
        return 1 if isinstance(self.tokens, Carried) else len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """What a slot may sample in this step: a bit for each token, the lowest bit of a byte first."""

    slot: Slot
    bits: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy one whole block before the step's forward (the last, partly filled block of a fork)."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step. ``step`` counts up by one from 0 on each node."""

    step: int
    joined: tuple[Joined, ...] = ()
    left: tuple[Slot, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    masks: tuple[TokenMask, ...] = ()  # of sampling chunks' slots; the others may sample any token

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class Sampled(NamedTuple):
    """What one sampling chunk gave: a token for each of its choices. ``logprobs`` is empty or as
    long.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-probabilities of the prompt tokens at positions ``start ..``, which the batch's chunk
    number ``chunk`` brought.
    """

    chunk: int
    start: int
    logprobs: tuple[PromptLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One ``Sampled`` for each chunk with ``num_samples`` > 0, in the chunks' order; one ``Scored``
    for each with prompt tokens whose log-probabilities are asked for.

    ``device_s``: from when the device was free for the step, or was given it, until it had done it.
    """

    step: int
    sampled: tuple[Sampled, ...]
    scored: tuple[Scored, ...] = ()
    device_s: float | None = None  # None: a CPU's is not measured
