"""Presence, frequency and repetition penalties: what each slot has said and what it costs.

Presence and frequency count output tokens, repetition counts prompt and output, as in the OpenAI
API and vLLM. Only the tokens of the history are touched, not the vocabulary: a slot keeps the ids
it has seen and how often each was output. Both lie on the device; how many ids there are is known
here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Slot
from pdserve.engine.staging import on_device

_FIRST_LINES = 4
_FIRST_CAPACITY = 256


class Penalties:
    """The histories of the slots that want penalties; lines of the tensors are lent to slots."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._histories = torch.zeros((_FIRST_LINES, _FIRST_CAPACITY), dtype=torch.int64).to(device)
        self._output_counts = torch.zeros((_FIRST_LINES, vocab_size), dtype=torch.float32).to(
            device
        )
        self._free = list(range(_FIRST_LINES))
        self._lines: dict[Slot, int] = {}
        self._lengths: dict[Slot, int] = {}

    def join(self, slot: Slot, history: Sequence[int], prompt_len: int) -> None:
        """Start a slot with the tokens so far, of which the first ``prompt_len`` are the prompt."""
        assert slot not in self._lines
        assert 0 < prompt_len <= len(history)
        if not self._free:
            self._add_lines()
        self._make_room(len(history))
        line = self._free.pop()
        self._lines[slot], self._lengths[slot] = line, len(history)
        tokens = on_device(history, torch.int64, self._device)
        # Unused places repeat a seen token, so that whole lines can be read without a mask.
        self._histories[line] = tokens[0]
        self._histories[line, : len(history)] = tokens
        outputs = tokens[prompt_len:]
        once = torch.ones(len(outputs), dtype=torch.float32, device=self._device)
        self._output_counts[line].zero_().index_add_(0, outputs, once)

    def leave(self, slot: Slot) -> None:
        self._free.append(self._lines.pop(slot))
        del self._lengths[slot]

    def apply_(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Sequence[Slot],
        sampling: Sequence[SamplingParams],
    ) -> None:
        """Change ``logits`` (float32 ``[R, V]``) at ``rows`` (int64 ``[P]``), one a slot."""
        lines = self._line_index(slots)
        longest = max(self._lengths[slot] for slot in slots)
        repetition, frequency, presence = on_device(
            [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in sampling],
            torch.float32,
            self._device,
        ).T[:, :, None]
        ids = self._histories[lines, :longest]  # [P, H]
        counts = self._output_counts[lines[:, None], ids]
        seen = logits[rows[:, None], ids]
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        seen -= frequency * counts
        seen -= presence * (counts > 0)
        # An id that stands in a line twice is written twice with the same value.
        logits[rows[:, None], ids] = seen

    def add(self, slots: Sequence[Slot], tokens: Tensor) -> None:
        """Count one more output token of each of ``slots`` (int64 ``[P]``, on the device)."""
        self._make_room(1 + max(self._lengths[slot] for slot in slots))
        lines = self._line_index(slots)
        ends = on_device([self._lengths[slot] for slot in slots], torch.int64, self._device)
        self._histories[lines, ends] = tokens
        self._output_counts[lines, tokens] += 1
        for slot in slots:
            self._lengths[slot] += 1

    def _line_index(self, slots: Sequence[Slot]) -> Tensor:
        return on_device([self._lines[slot] for slot in slots], torch.int64, self._device)

    def _add_lines(self) -> None:
        num_lines = len(self._histories)
        self._free.extend(range(num_lines, 2 * num_lines))
        self._histories = torch.cat((self._histories, torch.zeros_like(self._histories)))
        self._output_counts = torch.cat(
            (self._output_counts, torch.zeros_like(self._output_counts))
        )

    def _make_room(self, length: int) -> None:
        while self._histories.shape[1] < length:
            filler = self._histories[:, :1].expand_as(self._histories)
            self._histories = torch.cat((self._histories, filler), dim=1)
