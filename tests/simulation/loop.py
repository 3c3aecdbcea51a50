"""An event loop in which time is a number, and processes that share it.

When nothing is ready, the clock jumps to the next timer: an hour passes in a moment, and the same
run always goes the same way. Each callback belongs to the process in whose context it was made. A
stopped process runs nothing until it goes on, with all that has come due meanwhile; a dead one
runs nothing until the loop is closed down.
"""

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from itertools import count
from typing import Any, TypeVarTuple

_PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


Args = TypeVarTuple("Args")
FAR_S = 1e4  # between the clocks of two processes


class StuckError(Exception):
    """Nothing is ready and no timer runs: whoever waits now waits for ever."""


class Life(Enum):
    RUNNING = auto()
    STOPPED = auto()
    DEAD = auto()


class Process:
    """What would be a process of its own; made by ``VirtualLoop.process``."""

    def __init__(self, loop: "VirtualLoop", name: str, clock_offset_s: float) -> None:
        self.name = name
        self.life = Life.RUNNING
        self.held: list[_Call] = []
        self.resumed_s = 0.0  # when it last went on
        self.died = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # when it died: nobody else may know them
        self.context = contextvars.Context()
        self.context.run(_PROCESS.set, self)
        self._loop = loop
        self._clock_offset_s = clock_offset_s

    def __repr__(self) -> str:
        return self.name

    @property
    def is_dead(self) -> bool:
        return self.life is Life.DEAD

    def now_s(self) -> float:
        """Its own clock, as a ``Clock``; those of two processes have nothing in common."""
        return self._loop.time() + self._clock_offset_s

    def run(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        return self._loop.create_task(work, name=f"{self.name} {name}", context=self.context)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Have it called there, as soon as the process runs."""
        self._loop.call_soon(function, *args, context=self.context)

    def stop(self) -> None:
        if self.life is Life.RUNNING:
            self.life = Life.STOPPED

    def go_on(self) -> None:
        if self.life is Life.STOPPED:
            self.life = Life.RUNNING
            self.resumed_s = self._loop.time()
            held, self.held = self.held, []
            for call in held:  # at once: what others ask of it at this very time comes after
                call.now()

    def die(self) -> None:
        self.life = Life.DEAD
        self._tasks = asyncio.all_tasks(self._loop)
        self.died.set()

    def end(self) -> None:
        """Nothing of the process can be seen any more: what it holds may be given back."""
        self.life = Life.RUNNING
        held, self.held = self.held, []
        for call in held:
            call.again()


class _Call:
    """A callback and the process that must run for it."""

    __slots__ = ("_args", "_callback", "_context", "_loop", "_process", "handle")

    def __init__(
        self,
        loop: "VirtualLoop",
        process: Process,
        context: contextvars.Context | None,
        callback: Callable[..., object],
        args: tuple[Any, ...],
    ) -> None:
        self.handle: asyncio.Handle | None = None
        self._loop = loop
        self._process = process
        self._context = context or contextvars.copy_context()
        self._callback = callback
        self._args = args

    def __call__(self) -> None:
        if self._process.life is Life.RUNNING:
            self._callback(*self._args)
        else:
            self._process.held.append(self)

    def soon(self) -> asyncio.Handle:
        self.handle = asyncio.SelectorEventLoop.call_soon(self._loop, self, context=self._context)
        return self.handle

    def at(self, when: float) -> asyncio.TimerHandle:
        timer = self._loop.timer(when, self, (), self._context)
        self.handle = timer
        return timer

    def now(self) -> None:
        assert self.handle is not None
        if not self.handle.cancelled():
            self._context.run(self._callback, *self._args)

    def again(self) -> None:
        """What was held is due now, unless it was cancelled."""
        assert self.handle is not None
        if not self.handle.cancelled():
            self._loop.call_soon(self._callback, *self._args, context=self._context)


class _Timer(asyncio.TimerHandle):
    """One that comes after those of the same time that were made before it."""

    __slots__ = ("_number",)

    def __init__(
        self,
        number: int,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: contextvars.Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self._number = number

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        assert isinstance(other, _Timer)
        return (self.when(), self._number) < (other.when(), other._number)


class _Jump(selectors.SelectSelector):
    """Waits for nothing: it is later at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError("nothing is ready and no timer runs")
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Callbacks in the order of their times; those of one time in the order they were made."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        self.problems: list[str] = []  # what nobody caught
        self._processes: list[Process] = []
        self._numbers = count()
        self.set_exception_handler(_note_problem)

    def process(self, name: str) -> Process:
        """A new process. Its clock is far from those of all others."""
        process = Process(self, name, FAR_S * (1 + len(self._processes)))
        self._processes.append(process)
        return process

    def close_down(self) -> None:
        """End all tasks, those of dead processes too, and close. What goes wrong in that is of no
        interest: nothing like it happens outside.
        """
        self.set_exception_handler(_ignore)
        for process in self._processes:
            process.end()
        while tasks := asyncio.all_tasks(self):  # what ends may begin something
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=FAR_S))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def time(self) -> float:
        return self._jump.now_s

    def call_soon(
        self,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        process = _process_of(context)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        return _Call(self, process, context, callback, args).soon()

    def call_at(
        self,
        when: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        process = _process_of(context)
        if process is None:
            return self.timer(when, callback, args, context)
        return _Call(self, process, context, callback, args).at(when)

    def timer(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> asyncio.TimerHandle:
        """As ``call_at`` of asyncio's, whose heap does not keep those of one time in order."""
        timer = _Timer(next(self._numbers), when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer


def current_process() -> Process | None:
    return _PROCESS.get()


def _process_of(context: contextvars.Context | None) -> Process | None:
    return _PROCESS.get() if context is None else context.get(_PROCESS)


def _ignore(loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
    """Nobody looks any more."""


def _note_problem(loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    error = told.get("exception")
    loop.problems.append(f"{told['message']}: {error!r}" if error else told["message"])
