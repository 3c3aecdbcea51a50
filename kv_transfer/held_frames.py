"""Frames that came before their handoff was expected here: kept for a while, never too many."""

from collections.abc import Container
from dataclasses import dataclass

from kv_transfer.frame_queue import LinkId
from kv_transfer.messages import Frame
from kv_transfer.payload import Payload
from pdserve.core.request import HandoffId


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A frame, and the link that it came over."""

    link_id: LinkId
    frame: Frame
    payload: Payload | None
    since_s: float


class HeldFrames:
    """Owns them."""

    def __init__(self, *, max_per_link: int, patience_s: float) -> None:
        self._max_per_link = max_per_link
        self._patience_s = patience_s
        self._frames: list[Held] = []

    def hold(self, held: Held) -> bool:
        """False if the link has too many already."""
        if sum(other.link_id == held.link_id for other in self._frames) >= self._max_per_link:
            return False
        self._frames.append(held)
        return True

    def take(self, handoff: HandoffId) -> list[Held]:
        """The frames of this handoff, in the order they came; they are held no more."""
        taken = [held for held in self._frames if held.frame.handoff == handoff]
        self._frames = [held for held in self._frames if held.frame.handoff != handoff]
        return taken

    def keep_only(self, links: Container[LinkId]) -> None:
        """Other links are gone."""
        self._frames = [held for held in self._frames if held.link_id in links]

    def overdue(self, now_s: float) -> set[HandoffId]:
        """Handoffs whose frames have waited too long."""
        return {
            held.frame.handoff for held in self._frames if now_s - held.since_s > self._patience_s
        }
