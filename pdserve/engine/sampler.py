"""From logits to tokens: what each slot wants of its tokens, and the one call that samples a step.

Owns the ranks' sampling state of every slot. The order of the changes to the logits and their
meaning are those of ``SamplingParams``. Every rank runs this on the same logits and the same noise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.request import SamplingParams, TokenLogprobs
from pdserve.engine.batch import Joined, Slot
from pdserve.engine.noise import make_lanes, row_key, stream_of
from pdserve.engine.penalties import Penalties
from pdserve.engine.sampling_logprobs import RowLogprobs, wanted_logprobs
from pdserve.engine.sampling_race import Lots, draw, fast_race
from pdserve.engine.slot_picks import SlotPicks, pick_on
from pdserve.engine.staging import on_device
from pdserve.engine.token_masks import blocked_tokens

# Logits that are worked on together. On a CPU the buffers should stay in the cache (1 MiB each, up
# to twice as fast as 8 MiB at 32 rows of 49,152), elsewhere they bound the memory (32 MiB each).
_ELEMENTS_AT_ONCE_CPU = 1 << 18
_ELEMENTS_AT_ONCE = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One token to sample. ``position`` is the absolute position of that token in its sequence."""

    slot: Slot
    choice: int
    position: int


class SampledRows:
    """The tokens of one step, on the device until asked for: ``tokens`` is int64 ``[R]``.

    Each of ``logprobs`` comes with the row that it counts from.
    """

    def __init__(self, tokens: Tensor, logprobs: Sequence[tuple[int, RowLogprobs]] = ()) -> None:
        self.tokens = tokens
        self._logprobs = logprobs

    @property
    def has_logprobs(self) -> bool:
        """True if any row has log-probabilities."""
        return bool(self._logprobs)

    def logprobs(self, row: int) -> TokenLogprobs | None:
        """A row's log-probabilities, None where its slot asked for none. Waits for the device."""
        found = (logprobs.of(row - first) for first, logprobs in self._logprobs)
        return next((each for each in found if each is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlotState:
    sampling: SamplingParams
    prompt_len: int
    streams: dict[int, int]  # of the noise, by choice
    bias: tuple[Tensor, Tensor] | None  # token ids, what to add
    end_ids: Tensor | None  # to be masked until min_tokens

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def changes_logits(self) -> bool:
        return bool(self.sampling.needs_history or self.bias or self.end_ids is not None)

    @property
    def is_plain(self) -> bool:
        return self.is_greedy and not self.changes_logits and self.sampling.logprobs is None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A row with its place in the logits and what is known of its slot."""

    index: int
    row: SampleRow
    state: _SlotState
    mask: bytes | None  # of the tokens that may be sampled; None: all

    @property
    def changes_logits(self) -> bool:
        return self.mask is not None or self.state.changes_logits


class Sampler:
    """Samples the rows of each step; is told who joins and leaves, and counts what it sampled."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._lanes = make_lanes(vocab_size, device)
        self._fast_race = fast_race(device)
        self._penalties = Penalties(vocab_size, device)
        self._slots: dict[Slot, _SlotState] = {}
        self._pick = pick_on(device)
        self._picks = SlotPicks(max_num_seqs, device)

    def join(self, joined: Joined) -> None:
        """Set up a slot; its former tenant must have left."""
        slot, sampling = joined.slot, joined.sampling
        assert slot not in self._slots
        assert 0 <= slot < self._max_num_seqs
        # An id outside the vocabulary cannot be sampled anyway.
        bias = [pair for pair in sampling.logit_bias if 0 <= pair[0] < self._vocab_size]
        ends = [token_id for token_id in joined.end_token_ids if 0 <= token_id < self._vocab_size]
        self._slots[slot] = _SlotState(
            sampling=sampling,
            prompt_len=joined.prompt_len,
            streams={choice: stream_of(sampling.seed, choice) for choice in joined.choices},
            bias=(
                self._tensor([token_id for token_id, _ in bias], torch.int64),
                self._tensor([value for _, value in bias], torch.float32),
            )
            if bias
            else None,
            end_ids=self._tensor(ends, torch.int64) if ends and sampling.min_tokens else None,
        )
        if sampling.needs_history:
            self._penalties.join(slot, joined.history, joined.prompt_len)
        state = self._slots[slot]
        if state.is_plain:
            self._picks.take_likeliest(slot)
        elif len(state.streams) == 1 and self._races_as_it_lies(state):
            (stream,) = state.streams.values()
            self._picks.draw(slot, stream, sampling)
        else:
            self._picks.leave_out(slot)

    def leave(self, slot: Slot) -> None:
        """Forget a slot."""
        self._picks.leave(slot)
        if self._slots.pop(slot).sampling.needs_history:
            self._penalties.leave(slot)

    def picks(self, slots: Iterable[Slot]) -> bool:
        """True if ``pick`` samples one token for each of these slots as ``sample`` would, and
        nothing is wanted besides it.
        """
        return self._picks.hold(slots)

    def prepare_picks(self) -> None:
        """Queue for the device what ``pick`` has to know of those who joined."""
        self._picks.write()

    def pick(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tokens: Tensor,
        kept: Tensor | None = None,
    ) -> None:
        """``sample`` from tensors alone, which a CUDA graph may hold: into ``tokens`` (int64
        ``[R]``) one for each row of the raw ``logits`` (any float type ``[R, V]``), for its slot
        and absolute position (int64 ``[R]``). Copies ``logits`` to ``kept``, if there is one.

        Rows of slots that it does not pick for get any token.
        """
        self._pick(logits, slots, positions, self._picks.table, tokens, kept)

    def sample_repeated(
        self,
        logits: Tensor,
        repeats: Sequence[int],
        rows: Sequence[SampleRow],
        masks: Mapping[Slot, bytes] | None = None,
    ) -> SampledRows:
        """As ``sample``, of ``logits[repeats]``: several choices sample from one row of ``[L, V]``.

        Never more than ``max_num_seqs`` rows at a time, the most that memory was measured for.
        """
        tokens, logprobs = [], []
        for first in range(0, len(rows), self._max_num_seqs):
            part = slice(first, first + self._max_num_seqs)
            # Without a name: the logits of one part are gone before the next one's are copied.
            sampled, told = self._sample(
                logits[self._tensor(repeats[part], torch.int64)], rows[part], masks
            )
            tokens.append(sampled)
            logprobs += [] if told is None else [(first, told)]
        return SampledRows(torch.cat(tokens), logprobs)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        masks: Mapping[Slot, bytes] | None = None,
    ) -> SampledRows:
        """One token for each row of the raw ``logits`` ``[R, V]`` (any float type, not changed).

        ``masks`` say which tokens slots may sample, a bit for each; they heed ``min_tokens`` too.
        """
        tokens, told = self._sample(logits, rows, masks)
        return SampledRows(tokens, [] if told is None else [(0, told)])

    def _sample(
        self, logits: Tensor, rows: Sequence[SampleRow], masks: Mapping[Slot, bytes] | None
    ) -> tuple[Tensor, RowLogprobs | None]:
        expected = (len(rows), self._vocab_size)
        if logits.shape != expected:
            raise ValueError(f"logits: expected shape {expected}, got {tuple(logits.shape)}")
        mask_of = masks or {}
        lines = [
            _Line(index=index, row=row, state=self._slots[row.slot], mask=mask_of.get(row.slot))
            for index, row in enumerate(rows)
        ]
        tokens = self._choose(logits, lines)
        self._count(lines, tokens)
        wanted = wanted_logprobs([line.state.sampling.logprobs for line in lines])
        return tokens, RowLogprobs(logits, tokens, wanted) if wanted else None

    def _choose(self, logits: Tensor, lines: Sequence[_Line]) -> Tensor:
        drawn = [line for line in lines if not line.state.is_greedy]
        changed = [line for line in lines if line.state.is_greedy and line.changes_logits]
        if len(drawn) + len(changed) < len(lines):
            tokens = logits.float().argmax(1)
        else:
            tokens = torch.empty(len(lines), dtype=torch.int64, device=self._device)
        for part in self._parts(changed):
            index, part_logits = self._changed_logits(logits, part)
            tokens[index] = part_logits.argmax(1)
        as_they_lie = [line for line in drawn if self._is_fast(line) and not line.changes_logits]
        if as_they_lie:
            places = [line.index for line in as_they_lie]
            tokens[self._tensor(places, torch.int64)] = self._draw(logits, places, as_they_lie)
            drawn = [line for line in drawn if not self._is_fast(line) or line.changes_logits]
        for part in self._parts(drawn):
            index, part_logits = self._changed_logits(logits, part)
            tokens[index] = self._draw(part_logits, range(len(part)), part)
        return tokens

    def _is_fast(self, line: _Line) -> bool:
        return self._fast_race is not None and self._fast_race.can_draw(line.state.sampling)

    def _races_as_it_lies(self, state: _SlotState) -> bool:
        race, sampling = self._fast_race, state.sampling
        is_bare = not (state.is_greedy or state.changes_logits or sampling.logprobs is not None)
        return race is not None and is_bare and race.can_draw(sampling)

    def _draw(self, logits: Tensor, rows: Sequence[int], lines: Sequence[_Line]) -> Tensor:
        """A token for each line from its row of ``logits``; all rows, unless all are fast."""
        keys = [row_key(line.state.streams[line.row.choice], line.row.position) for line in lines]
        sampling = [line.state.sampling for line in lines]
        if self._fast_race is not None and all(map(self._is_fast, lines)):
            return self._fast_race.draw(logits, Lots.of(rows, keys, sampling))
        keys_there = on_device(keys, torch.int32, self._device)
        return draw(logits, keys_there, self._lanes, sampling)

    def _changed_logits(self, logits: Tensor, part: Sequence[_Line]) -> tuple[Tensor, Tensor]:
        """The lines' places ``[P]`` and a changed copy of their logits: float32 ``[P, V]``."""
        index = self._tensor([line.index for line in part], torch.int64)
        logits = logits.index_select(0, index).float()
        for i, line in enumerate(part):
            state = line.state
            if state.bias is not None:
                logits[i].index_add_(0, *state.bias)
            num_output = line.row.position - state.prompt_len
            is_early = line.mask is None and num_output < state.sampling.min_tokens
            if state.end_ids is not None and is_early:
                logits[i].index_fill_(0, state.end_ids, -torch.inf)
        self._block(logits, part)
        penalised = [i for i, line in enumerate(part) if line.state.sampling.needs_history]
        if penalised:
            self._penalties.apply_(
                logits,
                self._tensor(penalised, torch.int64),
                [part[i].row.slot for i in penalised],
                [part[i].state.sampling for i in penalised],
            )
        return index, logits

    def _block(self, logits: Tensor, part: Sequence[_Line]) -> None:
        """Leave only the tokens that the lines' masks allow."""
        masks = {i: line.mask for i, line in enumerate(part) if line.mask is not None}
        if not masks:
            return
        blocked = blocked_tokens(list(masks.values()), self._vocab_size, self._device)
        for row, i in enumerate(masks):
            logits[i].masked_fill_(blocked[row], -torch.inf)

    def _count(self, lines: Sequence[_Line], tokens: Tensor) -> None:
        # A slot with several choices samples once: they go on in slots of their own.
        counted = [
            line
            for line in lines
            if line.state.sampling.needs_history and len(line.state.streams) == 1
        ]
        if counted:
            index = self._tensor([line.index for line in counted], torch.int64)
            self._penalties.add([line.row.slot for line in counted], tokens[index])

    def _parts(self, lines: Sequence[_Line]) -> Iterator[Sequence[_Line]]:
        on_cpu = self._device.type == "cpu"
        elements = _ELEMENTS_AT_ONCE_CPU if on_cpu else _ELEMENTS_AT_ONCE
        size = max(1, elements // self._vocab_size)
        for first in range(0, len(lines), size):
            yield lines[first : first + size]

    def _tensor(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        return on_device(values, dtype, self._device)
