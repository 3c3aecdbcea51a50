"""The slots that a fast race draws for from the logits as they lie, and what it is told of them.

A step of hundreds of sequences has no time to gather that from objects: here it lies in tables, in
host memory, by slot.
"""

from collections.abc import Iterable, Sequence

import torch

from pdserve.core.request import SamplingParams
from pdserve.engine.batch import Slot
from pdserve.engine.noise import row_keys, signed_64
from pdserve.engine.sampling_race import Lots, reals_of, top_k_of
from pdserve.engine.staging import integers_on_host

_HOST = torch.device("cpu")


class RaceSlots:
    """Each slot samples one token a step, of one choice."""

    def __init__(self, max_num_seqs: int) -> None:
        self._slots: set[Slot] = set()
        self._streams = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._top_k = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._real = torch.zeros(max_num_seqs, 3)

    def join(self, slot: Slot, stream: int, sampling: SamplingParams) -> None:
        """``stream`` is the choice's, of ``noise.py``."""
        self._slots.add(slot)
        self._streams[slot] = signed_64(stream)
        self._top_k[slot] = top_k_of(sampling)
        self._real[slot] = torch.tensor(reals_of(sampling))

    def leave(self, slot: Slot) -> None:
        """Forget the slot, if it is here."""
        self._slots.discard(slot)

    def hold(self, slots: Iterable[Slot]) -> bool:
        """True if all of these are here."""
        return self._slots.issuperset(slots)

    def lots(self, slots: Sequence[Slot], positions: Sequence[int]) -> Lots:
        """Of the rows of the logits in their order, each for a slot and the position of the token
        that is sampled.
        """
        at = integers_on_host(slots, _HOST)
        keys = row_keys(self._streams[at], integers_on_host(positions, _HOST))
        rows = torch.arange(len(slots), dtype=torch.int32)
        whole = torch.cat((rows[:, None], keys, self._top_k[at][:, None]), dim=1)
        return Lots(whole, self._real[at])
