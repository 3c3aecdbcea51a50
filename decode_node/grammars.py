"""The grammars of a decode node's sequences: compiled and followed beside its loop, never in it.

    begin ──> compiling ──> mask known ──advance──> masking ──> mask known ──advance──> …
                  `──────────────┴────────────────────┴──> Failed (told once)

Threads compile and work masks out (the library gives up the GIL); everything else runs in the
node's event loop. A sequence is planned again when its mask is known (``Sequence.may_sample``), so
a grammar that takes long holds up nobody but itself. ``settle`` gives the quick ones, which are
nearly all, the moment that they need to be in the next step.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.errors import InternalError, InvalidRequestError, PdserveError
from pdserve.core.model_spec import ModelSpec
from pdserve.core.request import Grammar, RequestKey
from pdserve.text.grammar import GrammarCompiler, Matcher, TokenMask
from pdserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 4
MAX_CACHED = 128  # compiled grammars that are kept for the next request


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskKnown:
    """Some sequence can be planned again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """What the client has of the request is a whole answer: nothing may follow."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The sequence whose constraint this was cannot go on, nor its request."""

    state: "GrammarState"
    error: PdserveError


GrammarNews = MaskKnown | Complete | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The tokens that end an answer, and from how many output tokens on one may."""

    token_ids: tuple[int, ...]
    min_tokens: int


class GrammarState:
    """A ``Constraint``. Made by ``Grammars``."""

    def __init__(self, owner: "Grammars", key: RequestKey, ends: Ends, num_outputs: int) -> None:
        self.key = key
        self.mask: TokenMask | None = None
        self._owner = owner
        self._ends = ends
        self._num_outputs = num_outputs
        self._matcher: Matcher | None = None  # None: it is being compiled

    def start(self, matcher: Matcher, mask: TokenMask) -> None:
        """It is compiled, and this is what may come next."""
        self._matcher = matcher
        self.mask = self._without_ends(mask)

    def advance(self, token_id: int) -> bool:
        assert self._matcher is not None
        assert self.mask is not None, "sampled before its mask was known"
        error: PdserveError = InternalError(f"token {token_id} does not follow the grammar")
        self.mask = None
        try:
            follows = self._matcher.advance([token_id])
        except InvalidRequestError as too_much:
            follows, error = False, too_much
        if not follows:
            self._owner.fail(self, error)
            return False
        self._num_outputs += 1
        if self._matcher.is_complete:
            return True
        self._owner.mask(self, self._matcher)
        return False

    def copy(self) -> "GrammarState":
        assert self._matcher is not None
        assert self.mask is not None, "copied while it is worked on"
        new = GrammarState(self._owner, self.key, self._ends, self._num_outputs)
        new._matcher, new.mask = self._matcher.copy(), self.mask
        return new

    def go_on(self, mask: TokenMask) -> None:
        """This is what may come next."""
        self.mask = self._without_ends(mask)

    def _without_ends(self, mask: TokenMask) -> TokenMask:
        """The mask without ends that come too early, unless nothing else may come."""
        if self._num_outputs >= self._ends.min_tokens:
            return mask
        cut = bytearray(mask)
        for token_id in self._ends.token_ids:
            cut[token_id >> 3] &= ~(1 << (token_id & 7))
        return bytes(cut) if any(cut) else mask


class Grammars:
    """All grammars of one node. Made by ``start_grammars``, and used in the same event loop."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammars")
        self._compiler = self._threads.submit(load)
        self._compiled: OrderedDict[Grammar, tuple[Matcher, TokenMask]] = OrderedDict()
        self._due: list[tuple[GrammarState, Matcher]] = []  # to be given to the threads
        self._masking: set[asyncio.Task[None]] = set()
        self._compiling: set[asyncio.Task[None]] = set()
        self._news: asyncio.Queue[GrammarNews] = asyncio.Queue()

    def begin(
        self, key: RequestKey, grammar: Grammar, output_ids: Sequence[int], ends: Ends
    ) -> GrammarState:
        """The constraint of a sequence that has these output tokens; news tells when it is known.

        For a grammar that was seen lately it is known at once.
        """
        state = GrammarState(self, key, ends, len(output_ids))
        if not output_ids and (known := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            state.start(known[0].copy(), known[1])
        else:
            work = self._compile(state, grammar, tuple(output_ids))
            self._run(self._compiling, work, [state])
        return state

    def mask(self, state: GrammarState, matcher: Matcher) -> None:
        """Work out what may come next; the state's matcher is in use until then."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._mask_due)
        self._due.append((state, matcher))

    def fail(self, state: GrammarState, error: PdserveError) -> None:
        """The state is of no use any more."""
        self._news.put_nowait(Failed(state=state, error=error))

    async def until_loaded(self) -> None:
        """Wait until the compiler is made, or cannot be: whoever has a grammar is told why then."""
        loading = asyncio.wrap_future(self._compiler)
        await asyncio.wait([loading])
        loading.exception()  # who has a grammar gets it

    async def settle(self, timeout_s: float) -> None:
        """Wait until no mask is being worked out, or until the time is over."""
        self._mask_due()
        if self._masking:
            await asyncio.wait(self._masking, timeout=timeout_s)

    async def next_news(self) -> GrammarNews:
        return await self._news.get()

    def close(self) -> None:
        """End what can be ended; a thread at work ends with its work."""
        for task in (*self._masking, *self._compiling):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(
        self, state: GrammarState, grammar: Grammar, output_ids: tuple[int, ...]
    ) -> None:
        loop = asyncio.get_running_loop()
        compiler = await asyncio.wrap_future(self._compiler)
        if (known := self._compiled.get(grammar)) is None:
            known = await loop.run_in_executor(self._threads, _compiled, compiler, grammar)
            self._keep(grammar, known)
        matcher, mask = known[0].copy(), known[1]
        if output_ids:
            if not await loop.run_in_executor(self._threads, matcher.advance, output_ids):
                raise InvalidRequestError(grammar.field, "the tokens so far do not follow it")
            if matcher.is_complete:
                self._news.put_nowait(Complete(key=state.key))
                return
            mask = await loop.run_in_executor(self._threads, matcher.mask)
        state.start(matcher, mask)
        self._news.put_nowait(MaskKnown())

    def _mask_due(self) -> None:
        due, self._due = self._due, []
        for first in range(min(NUM_THREADS, len(due))):
            part = due[first::NUM_THREADS]
            self._run(self._masking, self._mask(part), [state for state, _ in part])

    async def _mask(self, part: list[tuple[GrammarState, Matcher]]) -> None:
        loop = asyncio.get_running_loop()
        matchers = [matcher for _, matcher in part]
        results = await loop.run_in_executor(self._threads, _masks, matchers)
        for (state, _), result in zip(part, results, strict=True):
            if isinstance(result, InvalidRequestError):
                self.fail(state, result)
            else:
                state.go_on(result)
        self._news.put_nowait(MaskKnown())

    def _keep(self, grammar: Grammar, compiled: tuple[Matcher, TokenMask]) -> None:
        self._compiled[grammar] = compiled
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)

    def _run(
        self,
        tasks: set[asyncio.Task[None]],
        work: Coroutine[object, object, None],
        states: list[GrammarState],
    ) -> None:
        """What goes wrong with the work is news of these states, and of nobody else."""

        def on_done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if task.cancelled() or (error := task.exception()) is None:
                return
            if not isinstance(error, PdserveError):
                logger.error("a grammar failed", exc_info=error)
                error = InternalError(f"grammar: {error!r}")
            for state in states:
                self.fail(state, error)

        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(on_done)


async def start_grammars(load: Callable[[], GrammarCompiler]) -> Grammars:
    """``load`` makes the model's compiler, in a thread.

    That holds the GIL for half a second and more, so it is over before the node can be asked.
    """
    grammars = Grammars(load)
    try:
        await grammars.until_loaded()
    except asyncio.CancelledError:
        grammars.close()
        raise
    return grammars


def load_compiler(model_dir: Path, model: ModelSpec) -> GrammarCompiler:
    """The compiler of a model's tokenizer. Raises ModelFilesError."""
    return GrammarCompiler(
        Tokenizer(model_dir), vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
    )


def _compiled(compiler: GrammarCompiler, grammar: Grammar) -> tuple[Matcher, TokenMask]:
    matcher = compiler.compile(grammar)
    return matcher, matcher.mask()


def _masks(matchers: Sequence[Matcher]) -> list[TokenMask | InvalidRequestError]:
    return [_mask_of(matcher) for matcher in matchers]


def _mask_of(matcher: Matcher) -> TokenMask | InvalidRequestError:
    try:
        return matcher.mask()
    except InvalidRequestError as error:
        return error
