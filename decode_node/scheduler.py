"""Which sequences a decode node admits, computes, withdraws and preempts. Decides only.

    WAITING --blocks free--> RESERVED --first_tokens, join (KV arrived)--> RUNNING --end--> over
                                |  `--prefill_locally--> LOCAL --last chunk--^
                                `--withdrawn / preempted / failed: over; goes on as another sequence

Blocks for the prompt and a head-room of output are reserved before any prefill is spent, beginning
with those that the prefix cache has: only the rest is computed here or comes by handoff. When a
running sequence needs a block and none is free, in this order and youngest first: handoffs that
have not started are withdrawn, then running and local sequences are preempted. What was withdrawn
or preempted goes on as a new sequence at its old place in the queue, with its tokens so far;
nothing is lost but work.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from decode_node.events import Admitted, Event, Forked, NewToken, PromptScored, Replaced
from pdserve.core.clock import Clock
from pdserve.core.config import DecodeConfig
from pdserve.core.request import RequestKey, TokenLogprobs
from pdserve.engine.batch import Batch, Chunk, Sampled, StepOutput
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """The pool's numbers that the scheduler goes by; as in ``core/config.py`` ``DecodeConfig``."""

    max_num_seqs: int
    max_num_batched_tokens: int
    local_prefill_tokens: int
    fallback_chunk: int
    headroom_tokens: int
    overtake_s: float

    @classmethod
    def of(cls, pool: DecodeConfig) -> "DecodeLimits":
        """Those of the cluster file."""
        return cls(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            local_prefill_tokens=pool.local_prefill_tokens,
            fallback_chunk=pool.fallback_chunk,
            headroom_tokens=pool.headroom_tokens,
            overtake_s=pool.overtake_s,
        )

    @property
    def local_chunk(self) -> int:
        """Tokens of a step that prompts which are routed here get, at most."""
        return min(self.local_prefill_tokens, self.max_num_batched_tokens)

    @property
    def max_sequences(self) -> int:
        """Sequences at once: each takes one token of a step's budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(slots=True)
class _Local:
    """A prompt that is prefilled here; ``budgeted`` if it was routed here, not a fallback."""

    sequence: Sequence
    budgeted: bool


def _age(sequence: Sequence) -> tuple[float, RequestKey, int]:
    """The order of all queues. Total: were two alike, each could be the other's victim for ever."""
    return sequence.arrived_s, sequence.key, sequence.choices[0]


class DecodeScheduler:
    """Continuous batching with local prefill chunks beside it; all queues by arrival."""

    def __init__(self, *, ledger: Ledger, clock: Clock, limits: DecodeLimits) -> None:
        self.ledger = ledger
        self._clock = clock
        self._limits = limits
        self._waiting: list[Sequence] = []
        self._reserved: list[Sequence] = []  # their prefill is somebody else's work
        self._started: dict[Sequence, list[Sequence]] = {}  # reserved, first tokens known: choices
        self._local: list[_Local] = []
        self._running: list[Sequence] = []
        self._events: list[Event] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._reserved)

    @property
    def num_waiting_for_blocks(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._local)

    @property
    def num_context_tokens(self) -> int:
        """Tokens that a step of all running sequences attends to."""
        return sum(sequence.num_planned for sequence in self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait for blocks or for local chunks."""
        local = (entry.sequence for entry in self._local)
        return sum(s.num_unplanned_prompt for s in (*self._waiting, *local))

    @property
    def waits_for_owner(self) -> bool:
        """Masks follow from tokens: they are worked out before the next plan."""
        return any(sequence.constraint is not None for sequence in self._running)

    def fits(self, sequence: Sequence) -> bool:
        """True if the sequence could run to its end on an idle node."""
        few_enough = len(sequence.choices) <= self._limits.max_sequences
        return few_enough and sequence.max_len <= self.ledger.max_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that ``fits``."""
        bisect.insort(self._waiting, sequence, key=_age)

    def admit(self) -> None:
        """Reserve blocks for waiting sequences; others pass one that has to wait, for a while."""
        now_s = self._clock.now_s()
        num_places = self._num_places()
        for sequence in list(self._waiting):
            if num_places <= 0:
                return
            if not sequence.may_sample:
                continue  # its grammar is still compiled
            if len(sequence.choices) <= num_places and self._reserve(sequence):
                num_places -= len(sequence.choices)
                self._waiting.remove(sequence)
                bisect.insort(self._reserved, sequence, key=_age)
                self._events.append(Admitted(sequence=sequence))
            elif now_s > sequence.arrived_s + self._limits.overtake_s:
                return

    def take_events(self) -> list[Event]:
        """What was decided and learned since the last call, in order.

        Without the admissions that a later plan has already withdrawn.
        """
        events, self._events = self._events, []
        return [e for e in events if not (isinstance(e, Admitted) and e.sequence.over)]

    def prefill_locally(self, sequence: Sequence, *, budgeted: bool) -> None:
        """Compute the prompt of a reserved sequence here, in chunks."""
        self._reserved.remove(sequence)
        self.ledger.enter(sequence)
        bisect.insort(self._local, _Local(sequence, budgeted), key=lambda e: _age(e.sequence))

    def first_tokens(self, sequence: Sequence, first: Sampled) -> None:
        """The first tokens of a reserved sequence are known; its KV is on its way."""
        assert not sequence.over
        going_on = self._take_first(sequence, first)
        if going_on:
            self._started[sequence] = going_on
        else:
            self.remove(sequence)

    def join(self, sequence: Sequence) -> None:
        """All KV of a started sequence's prompt is in its blocks: decode from here on."""
        going_on = self._started.pop(sequence)
        self._reserved.remove(sequence)
        sequence.num_planned = sequence.num_prompt
        self._run(sequence, going_on)

    def next_batch(self) -> Batch | None:
        """Plan one step: a token of each running sequence, oldest first, then local chunks."""
        self.admit()
        chunks: list[Chunk] = []
        sequences: list[Sequence] = []
        for sequence in list(self._running):
            if self._can_decode(sequence) and self._grow(sequence):
                chunks.append(self.ledger.chunk(sequence, 1, 1))
                sequences.append(sequence)
        budget = self._limits.max_num_batched_tokens - len(chunks)
        for sequence, length in list(self._local_chunks(budget)):
            chunks.append(self._local_chunk(sequence, length))
            sequences.append(sequence)
        return self.ledger.batch(chunks, sequences)

    def apply(self, batch: Batch, output: StepOutput) -> None:
        """Take in the oldest step's results; tokens of sequences that are over are dropped."""
        sampled = iter(output.sampled)
        scored = {item.chunk: item for item in output.scored}
        chunks = zip(self.ledger.retire(batch), batch.chunks, strict=True)
        for number, (sequence, chunk) in enumerate(chunks):
            got = next(sampled) if chunk.num_samples else None
            if number in scored and not sequence.over:
                self._events.append(PromptScored(sequence=sequence, scored=scored[number]))
            if got is None or sequence.over:
                continue
            if chunk.start + chunk.length > sequence.num_prompt:
                self._take_token(sequence, got, 0)
                continue
            going_on = self._take_first(sequence, got)
            if len(sequence.choices) > 1:
                self._local = [e for e in self._local if e.sequence is not sequence]
                self._run(sequence, going_on)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ends here; its blocks are free when nothing touches them any more."""
        for queue in (self._waiting, self._running, self._reserved):
            if sequence in queue:
                queue.remove(sequence)
        self._local = [entry for entry in self._local if entry.sequence is not sequence]
        self._started.pop(sequence, None)
        for parent, choices in list(self._started.items()):
            if sequence in choices:
                choices.remove(sequence)
                if not choices:
                    self.remove(parent)
        self.ledger.release(sequence)

    def start_again(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """End this life of a sequence and queue its next one (or its choices'); returns those."""
        lives = self._started.get(sequence, [sequence])
        new = tuple(life.again() for life in lives)
        self.remove(sequence)
        for life in new:
            self.add(life)
        return new

    def _wanted(self, sequence: Sequence) -> int:
        headroom = min(self._limits.headroom_tokens, sequence.max_len - sequence.num_prompt)
        wanted = sequence.num_prompt + headroom * len(sequence.choices)
        return min(wanted, self.ledger.max_tokens)

    def _num_places(self) -> int:
        """Sequences that may still come in: whoever is here has a place for each choice."""
        holders = [*self._reserved, *(entry.sequence for entry in self._local)]
        held = sum(len(holder.choices) for holder in holders) + len(self._running)
        return self._limits.max_sequences - held

    def _reserve(self, sequence: Sequence) -> bool:
        """Reserve blocks, unless the next growth of those that run would want them."""
        return self.ledger.begin(sequence, self._wanted(sequence), spare=len(self._running))

    def _can_decode(self, sequence: Sequence) -> bool:
        is_going_on = not sequence.over and sequence.num_expected < sequence.max_len
        return is_going_on and sequence.may_sample

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for one more position; may end younger sequences, or this one."""
        if self.ledger.has_room(sequence):
            return True
        while not self.ledger.reserve(sequence, sequence.num_planned + 1):
            if self.ledger.num_draining_blocks:
                return False  # blocks are about to come back
            victim = self._victim()
            if victim not in self._reserved:
                self.num_preemptions += 1
            self._events.append(Replaced(old=victim, new=self.start_again(victim)))
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        not_started = [s for s in self._reserved if s not in self._started]
        if not_started:
            return not_started[-1]
        # The youngest: never one that this step has already planned.
        return max((*(entry.sequence for entry in self._local), *self._running), key=_age)

    def _local_chunks(self, budget: int) -> Iterator[tuple[Sequence, int]]:
        """Oldest first: routed prompts share their budget, of the fallbacks one gets its chunk."""
        routed, fallback = self._limits.local_prefill_tokens, self._limits.fallback_chunk
        for entry in self._local:
            wanted = min(entry.sequence.num_unplanned_prompt, budget)
            if entry.budgeted and self._limits.local_prefill_tokens:
                length = min(wanted, routed)
                routed -= length
            else:
                length = min(wanted, fallback)
                fallback = 0 if length else fallback
            budget -= length
            if length:
                yield entry.sequence, length

    def _local_chunk(self, sequence: Sequence, length: int) -> Chunk:
        if length < sequence.num_unplanned_prompt:
            return self.ledger.chunk(sequence, length, 0)
        # Several choices part ways once their first tokens are known: no planning ahead for those.
        if len(sequence.choices) == 1:
            self._local = [entry for entry in self._local if entry.sequence is not sequence]
            bisect.insort(self._running, sequence, key=_age)
        return self.ledger.chunk(sequence, length, len(sequence.choices))

    def _take_first(self, sequence: Sequence, first: Sampled) -> list[Sequence]:
        """Note the first tokens; returns the sequences, one for each choice, that go on."""
        lives = [sequence]
        if len(sequence.choices) > 1:
            lives = [sequence.forked(choice) for choice in sequence.choices]
            self._events.append(Forked(parent=sequence, children=tuple(lives)))
        for i, life in enumerate(lives):
            self._take_token(life, first, i)
        return [life for life in lives if not life.over]

    def _run(self, sequence: Sequence, going_on: list[Sequence]) -> None:
        """Decode the choices of a sequence whose prompt's KV is in its blocks."""
        if going_on == [sequence]:
            self.ledger.enter(sequence)
            bisect.insort(self._running, sequence, key=_age)
            return
        self.ledger.leave(sequence)
        self.ledger.trim(sequence, sequence.num_prompt)
        for child in going_on:
            if self.ledger.fork(sequence, child):
                self.ledger.enter(child)
                bisect.insort(self._running, child, key=_age)
            else:
                new = self.start_again(child)
                self._events.append(Replaced(old=child, new=new))
        self.remove(sequence)

    def _take_token(self, sequence: Sequence, got: Sampled, i: int) -> None:
        logprobs: TokenLogprobs | None = got.logprobs[i] if got.logprobs else None
        index = sequence.num_outputs
        reason = sequence.append(got.tokens[i])
        self._events.append(
            NewToken(
                sequence=sequence,
                token_id=got.tokens[i],
                index=index,
                logprobs=logprobs,
                finish_reason=reason,
            )
        )
        if reason is not None:
            self.remove(sequence)
