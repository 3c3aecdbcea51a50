"""Whether a grammar can be followed, found out before anything is spent on its request.

There are small grammars that take hours to compile, and nothing can end a thread. So a process of
its own compiles each new one first (``pdserve/text/grammar_process.py``): it is started with the
first grammar and made anew when it has ended, which the grammar that it had may have done, or
somebody else. What was found out about a grammar is kept for the next request.
"""

import asyncio
import json
import logging
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdserve.core.config import LimitsConfig
from pdserve.core.errors import (
    InternalError,
    InvalidRequestError,
    OverloadedError,
    ShuttingDownError,
)
from pdserve.core.model_spec import ModelSpec
from pdserve.core.request import Grammar, GrammarKind
from pdserve.text import grammar_process
from pdserve.text.nesting import TOO_DEEP

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0  # the process ends itself long before, unless it gets no CPU
MAX_TRIES = 2  # of a grammar whose process is ended by somebody else
MAX_WAITING, RETRY_AFTER_S = 32, 1.0
MAX_KNOWN = 1024
TOO_MUCH_MEMORY = "compiling it takes too much memory"
# Exit statuses of a process that its grammar has ended.
_ENDED_BY_GRAMMAR = {
    grammar_process.OUT_OF_MEMORY: TOO_MUCH_MEMORY,
    -signal.SIGABRT: TOO_MUCH_MEMORY,
    -signal.SIGSEGV: TOO_DEEP,
}

logger = logging.getLogger(__name__)


class GrammarChecks:
    """All checks of one router."""

    def __init__(self, model_dir: Path, model: ModelSpec, limits: LimitsConfig) -> None:
        self._limits = limits
        self._command = [
            *(sys.executable, "-m", grammar_process.__name__, str(model_dir)),
            *(str(model.vocab_size), str(limits.grammar_timeout_s)),
            *map(str, model.eos_token_ids),
        ]
        self._known: OrderedDict[tuple[GrammarKind, str], str | None] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None  # the only one that uses the process
        self._process: subprocess.Popen[bytes] | None = None
        self._num_waiting = 0
        self._closing = False

    async def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError naming the field if no answer can follow the grammar.

        Raises OverloadedError while very many wait for this, or where it could not be found out.
        """
        self._check_text(grammar)
        key = (grammar.kind, grammar.text)
        if key not in self._known:
            self._keep(key, await self._ask(grammar))
        if (problem := self._known[key]) is not None:
            raise InvalidRequestError(grammar.field, problem)

    def _check_text(self, grammar: Grammar) -> None:
        try:
            size, most = len(grammar.text.encode()), self._limits.max_grammar_bytes
        except UnicodeEncodeError as error:
            problem = f"not valid Unicode: {error.reason}"
            raise InvalidRequestError(grammar.field, problem) from None
        if size > most:
            problem = f"got {size} bytes, at most {most} are allowed"
            raise InvalidRequestError(grammar.field, problem)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._closing = True
        if self._process is not None:
            self._process.kill()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._end()

    async def _ask(self, grammar: Grammar) -> str | None:
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(
                "many new grammars wait to be compiled", retry_after_s=RETRY_AFTER_S
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-checks")
        self._num_waiting += 1
        try:
            asking = asyncio.get_running_loop().run_in_executor(
                self._thread, self._ask_process, grammar
            )
            return await asyncio.shield(asking)
        finally:
            self._num_waiting -= 1

    def _ask_process(self, grammar: Grammar) -> str | None:
        """In the thread: what is wrong with the grammar."""
        line = json.dumps({"kind": grammar.kind, "text": grammar.text}).encode() + b"\n"
        for _ in range(MAX_TRIES):
            answer = self._answer_to(line)
            if answer:
                problem: str | None = json.loads(answer)
                return problem
            status = self._end()
            if self._closing:
                raise ShuttingDownError("the router is shutting down")
            if answer is None:
                problem = f"compiling a grammar got no processor time in {ANSWER_TIMEOUT_S:g} s"
                raise OverloadedError(problem, retry_after_s=RETRY_AFTER_S)
            if status == -grammar_process.TOO_LONG:
                limit_s = self._limits.grammar_timeout_s
                return f"compiling it takes more than grammar_timeout_s = {limit_s:g} s"
            if status in _ENDED_BY_GRAMMAR:
                return _ENDED_BY_GRAMMAR[status]
            logger.warning("the process that compiles grammars ended: %s", status)
        problem = f"the process that compiles grammars ended {MAX_TRIES} times, status {status}"
        raise OverloadedError(problem, retry_after_s=RETRY_AFTER_S)

    def _answer_to(self, line: bytes) -> str | None:
        """The process's line, "" where it has ended, None where none comes in time."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # while it had nothing to do
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: seen below
        return _read_line(process, ANSWER_TIMEOUT_S)

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        if (line := _read_line(self._process, START_TIMEOUT_S)) != f"{grammar_process.READY}\n":
            status = self._end()
            raise InternalError(f"the process that compiles grammars ended: {line!r}, {status}")
        return self._process

    def _end(self) -> int | None:
        """Let go of the process; its exit status."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        with process:
            return process.wait()

    def _keep(self, key: tuple[GrammarKind, str], problem: str | None) -> None:
        self._known[key] = problem
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> str | None:
    """The next line, "" at its end, None where none comes in time."""
    assert process.stdout is not None
    waiting = select.poll()  # unlike select() it knows files beyond the 1,024th
    waiting.register(process.stdout, select.POLLIN)
    is_there = waiting.poll(timeout_s * 1000)
    return process.stdout.readline().decode() if is_there else None
