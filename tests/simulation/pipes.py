"""Streams between processes: ordered, late, cut, held, and over when an end has died.

Knows no gRPC: what is sent is bytes or a word of its owner. ``Wires`` is all of them, and what a
schedule may do to them.
"""

from collections import Counter
from collections.abc import Callable
from random import Random

from tests.simulation.loop import Process, VirtualLoop

Receive = Callable[[object], None]
NEXT_S = 1e-6  # two things of one stream never arrive at one time
SHARE_LOST = 0.5  # of the connections that break, with all that is on its way


class Pipe:
    """One direction. ``receive`` runs in the receiver's process."""

    def __init__(self, wires: "Wires", sender: Process, receiver: Process, random: Random) -> None:
        self.receive: Receive | None = None  # set before anything is sent
        self._random = random
        self._wires = wires
        self._sender = sender
        self._receiver = receiver
        self._last_s = 0.0
        self._is_cut = False
        self._num_lost = 0  # times that all was lost which was on its way

    def send(self, item: object) -> None:
        if not self._is_cut and not self._sender.is_dead and not self._wires.is_over:
            self._bring(item)

    def cut(self, last_word: object, *, loses: bool = False) -> None:
        """Nothing more comes through but the news that this was all; ``loses``: nor does what is
        on its way.
        """
        if not self._is_cut:
            self._is_cut = True
            self._num_lost += loses
            self._bring(last_word)

    def _bring(self, item: object) -> None:
        leaves_s = self._wires.leaves_s(self._sender, self._receiver)
        arrives_s = leaves_s + self._wires.longest_s * self._random.random()
        self._last_s = max(self._last_s + NEXT_S, arrives_s)
        self._wires.loop.call_at(
            self._last_s, self._arrive, item, self._num_lost, context=self._receiver.context
        )

    def _arrive(self, item: object, num_lost: int) -> None:
        assert self.receive is not None
        if num_lost == self._num_lost:
            self.receive(item)


class Connection:
    """Both directions between a client and a server. ``random`` is its own: what others send, and
    in which order, changes nothing here.
    """

    def __init__(self, wires: "Wires", client: Process, server: Process, random: Random) -> None:
        self.client = client
        self.server = server
        self.random = random
        self.up = Pipe(wires, client, server, Random(random.random()))
        self.down = Pipe(wires, server, client, Random(random.random()))

    def cut(self, last_word: object) -> None:
        """It breaks; of what is on its way all comes or nothing."""
        loses = self.random.random() < SHARE_LOST
        self.up.cut(last_word, loses=loses)
        self.down.cut(last_word, loses=loses)


class Wires:
    """All connections. Each thing sent is up to ``longest_s`` on its way."""

    def __init__(self, loop: VirtualLoop, *, longest_s: float, seed: int) -> None:
        self.loop = loop
        self.is_over = False  # nobody is told anything any more
        self.longest_s = longest_s
        self._seed = seed
        self._num_connections: Counter[str] = Counter()
        self._connections: list[Connection] = []
        self._held_until_s: dict[frozenset[str], float] = {}  # by the names of two processes
        self._cut_s: dict[frozenset[str], float] = {}  # likewise: when a connection last broke

    def connect(self, client: Process, server: Process) -> Connection:
        pair = f"{client.name} {server.name}"
        self._num_connections[pair] += 1
        random = Random(f"{self._seed} {pair} {self._num_connections[pair]}")
        connection = Connection(self, client, server, random)
        self._connections.append(connection)
        return connection

    def cut(self, connection: Connection, last_word: object) -> None:
        """The connection breaks, and is one no more."""
        self._cut_s[frozenset((connection.client.name, connection.server.name))] = self.loop.time()
        connection.cut(last_word)
        self.forget(connection)

    def forget(self, connection: Connection) -> None:
        """It is over at both ends."""
        if connection in self._connections:
            self._connections.remove(connection)

    def between(self, one: str, other: str | None = None) -> list[Connection]:
        """The connections of a process, by its name, or between two."""
        wanted = {one} if other is None else {one, other}
        return [c for c in self._connections if wanted <= {c.client.name, c.server.name}]

    def hold(self, one: str, other: str, duration_s: float) -> None:
        """What is sent between two processes arrives only after a while."""
        pair = frozenset((one, other))
        until_s = self.loop.time() + duration_s
        self._held_until_s[pair] = max(until_s, self._held_until_s.get(pair, 0.0))

    def leaves_s(self, sender: Process, receiver: Process) -> float:
        """When what is sent now is on its way."""
        held_s = self._held_until_s.get(frozenset((sender.name, receiver.name)), 0.0)
        return max(self.loop.time(), held_s)

    def disturbed_until_s(self, one: str, other: str) -> float:
        """When that was over which last kept two processes from telling each other something."""
        pair = frozenset((one, other))
        return max(self._held_until_s.get(pair, 0.0), self._cut_s.get(pair, 0.0))
