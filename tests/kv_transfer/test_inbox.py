"""What the endpoint's thread waits for comes in whole, from wherever it comes."""

import socket
from threading import Thread

from kv_transfer.inbox import Inbox, Sources


class Lines:
    """Reads a byte at a time, as a number."""

    def __init__(self) -> None:
        self.there, self._here = socket.socketpair()

    def fileno(self) -> int:
        return self._here.fileno()

    def read(self) -> list[int]:
        return list(self._here.recv(1))

    def close(self) -> None:
        self.there.close()
        self._here.close()


def test_nothing_comes_within_the_time() -> None:
    inbox: Inbox[int] = Inbox(Sources())
    assert inbox.take(0.0) == []
    assert inbox.take(0.01) == []
    inbox.close()


def test_what_was_put_comes_in_order_and_wakes_who_waits() -> None:
    inbox: Inbox[int] = Inbox(Sources())
    for number in range(5):
        inbox.put(number)
    assert inbox.take(20.0) == [0, 1, 2, 3, 4]
    putting = Thread(target=inbox.put, args=(5,))
    putting.start()
    came: list[int] = []
    while not came:  # a bell of before may wake too early
        came = inbox.take(20.0)
    assert came == [5]
    putting.join()
    inbox.close()


def test_sources_are_read_beside_it_until_they_are_forgotten() -> None:
    sources: Sources[int] = Sources()
    inbox, lines = Inbox(sources), Lines()
    sources.watch(lines)
    inbox.put(1)
    lines.there.send(b"\2\3")
    assert inbox.take(20.0) == [1, 2]
    assert inbox.take(20.0) == [3]
    lines.there.send(b"\4")
    sources.forget(lines)
    assert inbox.take(0.0) == []
    lines.close()
    inbox.close()


def test_more_is_put_than_a_bell_rings_and_nothing_is_put_into_what_is_closed() -> None:
    inbox: Inbox[int] = Inbox(Sources())
    for number in range(5000):
        inbox.put(number)
    assert len(inbox.take(0.0)) == 5000
    inbox.close()
    inbox.put(1)
