"""Whose turn it is where one at a time may move payloads: they have it in the order they came."""

from collections import deque
from dataclasses import dataclass, field
from threading import Lock


class Turn:
    """Waits on entry, until all that came before have left.

    A lock of Python's goes to who asks while it is free: mostly the thread that has just let go.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # held for the next line only
        self._places: deque[Lock] = deque()  # of who has the turn, and who waits

    def __enter__(self) -> None:
        place = Lock()
        place.acquire()
        with self._lock:
            self._places.append(place)
            if len(self._places) == 1:
                return
        place.acquire()  # until the one before has left

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._places.popleft()
            if self._places:
                self._places[0].release()

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for who has it."""
        return len(self._places) > 1


@dataclass(frozen=True, slots=True)
class Turns:
    """One link of a rank at a time: held while payloads are moved out of band by a GPU.

    Two, one for each direction: with one lock two ranks that send to each other would wait for
    ever.
    """

    sending: Turn = field(default_factory=Turn)
    receiving: Turn = field(default_factory=Turn)
