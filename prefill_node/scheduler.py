"""Which prompts a prefill node computes next. Decides only; knows no time but its Clock's.

Order: first come, first served, with ageing by lane. Lanes are length classes; the router says
which one a prompt has, 0 being that of the shortest. A prompt's place in the queue is its arrival
plus ``overtake_s`` for each lane above the first: a short prompt passes a long one that came up to
that much earlier, never one that has waited longer. A prompt starts only when blocks for the whole
of it are free, so there is no preemption here and no deadlock; what the prefix cache holds of it is
not computed again. Blocks stay with the sequence until its handoff is over (``release``).
"""

import bisect
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.engine.batch import Batch, Sampled, Scored, StepOutput
from pdserve.engine.chunking import share_budget
from pdserve.engine.ledger import Ledger
from pdserve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensComputed:
    """KV of ``sequence`` is computed, or was cached, up to ``num_tokens``; with the last chunk come
    the first tokens.
    """

    sequence: Sequence
    num_tokens: int
    first: Sampled | None
    scored: Scored | None = None  # of the chunk's prompt tokens, where that is asked for


class PrefillScheduler:
    """Waiting and running prompts of one prefill node."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        clock: Clock,
        max_num_batched_tokens: int,
        overtake_s: float,
    ) -> None:
        self.ledger = ledger
        self._clock = clock
        self._max_num_batched_tokens = max_num_batched_tokens
        self._overtake_s = overtake_s
        self._waiting: list[Sequence] = []  # in order of their places
        self._running: list[Sequence] = []  # likewise; they hold blocks and a slot
        self._events: list[TokensComputed] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has been planned for."""
        return sum(s.num_unplanned_prompt for s in (*self._waiting, *self._running))

    @property
    def waits_for_owner(self) -> bool:
        """First tokens leave before anything else is done: somebody waits for them."""
        return True

    def fits(self, num_tokens: int) -> bool:
        """True if a prompt of this length could run on an idle node."""
        return num_tokens <= self.ledger.max_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt that ``fits``."""
        assert self.fits(sequence.num_prompt)
        bisect.insort(self._waiting, sequence, key=self._place)

    def next_batch(self) -> Batch | None:
        """Plan one step of at most ``max_num_batched_tokens`` prompt tokens."""
        self._admit()
        chunks, sequences = [], []
        for sequence, length in share_budget(self._running, self._max_num_batched_tokens):
            is_last = length == sequence.num_unplanned_prompt
            num_samples = len(sequence.choices) if is_last else 0
            chunks.append(self.ledger.chunk(sequence, length, num_samples))
            sequences.append(sequence)
        batch = self.ledger.batch(chunks, sequences)
        if batch is not None:
            for sequence in sequences:
                if not sequence.num_unplanned_prompt:
                    self._running.remove(sequence)
                    self.ledger.leave(sequence)
        return batch

    def apply(self, batch: Batch, output: StepOutput) -> None:
        """Take in the oldest step's results; sequences removed meanwhile give no event."""
        sampled = iter(output.sampled)
        scored = {item.chunk: item for item in output.scored}
        chunks = zip(self.ledger.retire(batch), batch.chunks, strict=True)
        for number, (sequence, chunk) in enumerate(chunks):
            first = next(sampled) if chunk.num_samples else None
            if not sequence.over:
                self._events.append(
                    TokensComputed(
                        sequence=sequence,
                        num_tokens=chunk.start + chunk.length,
                        first=first,
                        scored=scored.get(number),
                    )
                )

    def take_events(self) -> list[TokensComputed]:
        """What was learned since the last call, in order."""
        events, self._events = self._events, []
        return events

    def remove(self, sequence: Sequence) -> None:
        """Compute nothing more of this sequence. Its blocks stay until ``release``."""
        sequence.over = True
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
        self.ledger.leave(sequence)

    def release(self, sequence: Sequence) -> None:
        """The handoff is over: free the blocks once no step touches them."""
        self.remove(sequence)
        self.ledger.release(sequence)

    def _place(self, sequence: Sequence) -> float:
        return sequence.arrived_s + sequence.lane * self._overtake_s

    def _admit(self) -> None:
        """Start prompts that fit; others pass one that does not, until it has waited too long."""
        now_s = self._clock.now_s()
        for sequence in list(self._waiting):
            if not self.ledger.num_free_slots:
                return
            if self.ledger.begin(sequence, sequence.num_prompt):
                self._waiting.remove(sequence)
                self.ledger.enter(sequence)
                bisect.insort(self._running, sequence, key=self._place)
                self._note_cached(sequence)
            elif now_s > self._place(sequence) + self._overtake_s:
                return

    def _note_cached(self, sequence: Sequence) -> None:
        if num_tokens := sequence.num_cached:
            self._events.append(
                TokensComputed(sequence=sequence, num_tokens=num_tokens, first=None)
            )
