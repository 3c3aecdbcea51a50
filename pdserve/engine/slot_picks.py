"""How each slot picks its token from the logits as they lie: a table on the device.

What a step does to end is the same whoever is in it, so that it can be part of a CUDA graph: each
row's slot has a line that says to take the likeliest token or what to draw one with. Lines are
written when sequences join. Slots that want more than that are not here.
"""

import struct
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from pdserve.core.plugin import load_plugin
from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Slot
from pdserve.engine.noise import signed_64
from pdserve.engine.sampling_race import reals_of, top_k_of
from pdserve.engine.staging import integers_on_host, on_device

# A line: the stream of the noise (64 bits), top_k, temperature, top_p, min_p. Zeros: the likeliest.
_LINE = struct.Struct("<qifff8x")
LINE_WORDS = _LINE.size // 4
_LIKELIEST = bytes(_LINE.size)
_FAST = "pdserve.engine.slot_picks_triton:pick"


class Pick(Protocol):
    """The end of a step. It waits for nothing and may be captured."""

    def __call__(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        table: Tensor,
        tokens: Tensor,
        kept: Tensor | None,
    ) -> None:
        """Into ``tokens`` (int64 ``[R]``) what each row of ``logits`` (any float type ``[R, V]``)
        gives by the line of its slot (int64 ``[R]``): the largest's id, the least where there are
        several, or a draw for this absolute position (int64 ``[R]``). Copies ``logits`` to
        ``kept``, if there is one.
        """


def pick_likeliest(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    tokens: Tensor,
    kept: Tensor | None,
) -> None:
    """In plain torch, for tables without draws."""
    if kept is not None:
        kept.copy_(logits)
    tokens.copy_(logits.float().argmax(1))


def pick_on(device: torch.device) -> Pick:
    """The fastest for this device."""
    if device.type != "cuda":
        return pick_likeliest
    try:
        fast: Pick = load_plugin(_FAST)
    except ImportError:
        return pick_likeliest
    return fast


class SlotPicks:
    """Each slot here samples one token a step, of one choice. ``table`` is int32, a line for each
    slot and one more, of the likeliest, for the spare slot.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.table = torch.zeros(max_num_seqs + 1, LINE_WORDS, dtype=torch.int32, device=device)
        self._device = device
        self._slots: set[Slot] = set()
        self._lines = [_LIKELIEST] * max_num_seqs
        self._unwritten: set[Slot] = set()

    def take_likeliest(self, slot: Slot) -> None:
        """A sequence joined that wants the likeliest tokens."""
        self._join(slot, _LIKELIEST)

    def draw(self, slot: Slot, stream: int, sampling: SamplingParams) -> None:
        """A sequence joined that draws from all its logits; ``stream`` is the choice's, of
        ``noise.py``.
        """
        self._join(slot, _LINE.pack(signed_64(stream), top_k_of(sampling), *reals_of(sampling)))

    def leave_out(self, slot: Slot) -> None:
        """A sequence joined that is not picked for: what its slot drew with before is forgotten."""
        self.take_likeliest(slot)
        self.leave(slot)

    def leave(self, slot: Slot) -> None:
        """Forget the slot, if it is here."""
        self._slots.discard(slot)

    def hold(self, slots: Iterable[Slot]) -> bool:
        """True if all of these are here."""
        return self._slots.issuperset(slots)

    def write(self) -> None:
        """Queue what joined since the last time for the table."""
        if not self._unwritten:
            return
        slots = sorted(self._unwritten)
        self._unwritten.clear()
        words = struct.iter_unpack("<q", b"".join(self._lines[slot] for slot in slots))
        lines = integers_on_host([word for (word,) in words], self._device)
        there = lines.to(self._device, non_blocking=True).view(torch.int32)
        places = on_device(slots, torch.int64, self._device)
        self.table[places] = there.view(len(slots), LINE_WORDS)

    def _join(self, slot: Slot, line: bytes) -> None:
        self._slots.add(slot)
        if line != self._lines[slot]:
            self._lines[slot] = line
            self._unwritten.add(slot)
