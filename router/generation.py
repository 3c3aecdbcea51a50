"""The answers to one call while they come: what the HTTP and gRPC faces read.

Joins the dispatcher's token news with text. Leaving the ``with`` block ends whatever still runs, so
a client that goes away takes its requests with it.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

from pdserve.core.errors import PdserveError
from pdserve.core.request import PromptOutput, TokenOutput
from pdserve.text.tokenizer import Tokenizer
from router.best_of import BestOf
from router.choice_text import ChoiceText, Delta, TextRules
from router.dispatch import Dispatcher
from router.inbox import Call, News, RequestOver
from router.legs import Job
from router.prompt_scores import PromptScores
from router.tool_use import CallRules

NEWS_AT_ONCE = 64  # of a call whose answer is given whole: nobody waits for the single tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt, ready to be dispatched."""

    job: Job
    rules: TextRules
    best_of: BestOf | None = None  # None: every choice is given
    calls: CallRules | None = None  # None: no tool calls are looked for

    @property
    def num_given(self) -> int:
        """Choices that the client gets."""
        return self.best_of.num_given if self.best_of else self.job.num_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a call; those up to the one that completed a stop string count.

    ``cached_tokens`` are prompt tokens whose KV was not computed for it; known once all is over.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Iterate it for the deltas, as many at a time as have come."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        call: Call,
    ) -> None:
        self.request_ids = call.request_ids
        self._dispatcher = dispatcher
        self._inbox = call.inbox
        self._prompt_tokens = sum(len(request.job.prompt_ids) for request in requests)
        self._has_stop_strings = any(request.rules.stop for request in requests)
        self._best_of = {prompt: each.best_of for prompt, each in enumerate(requests)}
        self._completion_tokens = 0
        self._texts = {
            (prompt, choice): ChoiceText(
                tokenizer, request.rules, request.job.prompt_ids, prompt=prompt
            )
            for prompt, request in enumerate(requests)
            for choice in range(request.job.num_choices)
        }
        self._prompt_scores = {
            prompt: PromptScores(len(request.job.prompt_ids))
            for prompt, request in enumerate(requests)
            if request.job.sampling.prompt_logprobs is not None
        }
        self._overs: dict[int, RequestOver] = {}

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(over.cached_tokens for over in self._overs.values()),
        )

    @property
    def overs(self) -> tuple[RequestOver, ...]:
        """How each prompt went, in their order; all are there once the iteration has ended."""
        return tuple(self._overs[prompt] for prompt in sorted(self._overs))

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Raises the error of the first request that fails, after what came before it."""
        return self._deltas(at_least=1)

    async def _deltas(self, *, at_least: int) -> AsyncIterator[list[Delta]]:
        while len(self._overs) < len(self.request_ids):
            deltas: list[Delta] = []
            failed: PdserveError | None = None
            for prompt, news in _merged(await self._inbox.take(at_least)):
                if isinstance(news, RequestOver):
                    self._overs[prompt] = news
                    failed = failed or news.error
                elif isinstance(news, PromptOutput):
                    self._take_scores(prompt, news)
                elif delta := self._delta(prompt, news):
                    deltas.append(delta)
            if deltas:
                yield deltas
            if failed is not None:
                raise failed

    async def collect(self) -> list[Delta]:
        """Each choice's whole answer, by prompt and choice; the best where ``best_of`` is asked."""
        parts: dict[tuple[int, int], list[Delta]] = {}
        # A stop string ends work on a node, so it is looked for in every token at once.
        at_least = 1 if self._has_stop_strings else NEWS_AT_ONCE
        async for deltas in self._deltas(at_least=at_least):
            for delta in deltas:
                parts.setdefault((delta.prompt, delta.choice), []).append(delta)
        answers: dict[int, list[Delta]] = {}
        for key in sorted(parts):
            answers.setdefault(key[0], []).append(_joined(parts[key]))
        return [each for prompt, all_of in answers.items() for each in self._given(prompt, all_of)]

    def _given(self, prompt: int, answers: list[Delta]) -> list[Delta]:
        best_of = self._best_of[prompt]
        if best_of is None:
            return answers
        best = [answers[i] for i in best_of.choose([each.logprobs for each in answers])]
        if not best_of.show_logprobs:
            best = [replace(answer, logprobs=()) for answer in best]
        return [replace(answer, choice=choice) for choice, answer in enumerate(best)]

    def _take_scores(self, prompt: int, output: PromptOutput) -> None:
        if (scores := self._prompt_scores.get(prompt)) is not None:
            scores.add(output)

    def _delta(self, prompt: int, output: TokenOutput) -> Delta | None:
        text = self._texts.get((prompt, output.choice))
        if text is None:
            return None  # it reached a stop string; its node had not heard yet
        delta = text.push(output)
        if (scores := self._prompt_scores.get(prompt)) and output.token_ids:
            delta = replace(delta, prompt_logprobs=scores.first_seen(output.choice))
        self._completion_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            del self._texts[prompt, output.choice]
            if output.finish_reason is None:
                self._dispatcher.stop_choice(self.request_ids[prompt], output.choice)
        return delta


@contextmanager
def generate(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    *,
    label: str,
    tenant: str,
    arrived_s: float,
    traceparent: str | None = None,
) -> Iterator[Generation]:
    """Dispatch a call's prompts; errors of admission are raised here, later ones on iteration."""
    jobs = [request.job for request in requests]
    call = dispatcher.start(
        jobs, label=label, tenant=tenant, arrived_s=arrived_s, traceparent=traceparent
    )
    try:
        yield Generation(dispatcher, tokenizer, requests, call)
    finally:
        dispatcher.forget(call.request_ids)


def _merged(news: list[tuple[int, News]]) -> Iterator[tuple[int, News]]:
    """Outputs of one choice that came while nobody looked become one output."""
    if len(news) == 1:
        yield news[0]
        return
    outputs: dict[tuple[int, int], list[TokenOutput]] = {}
    overs: list[tuple[int, News]] = []
    for prompt, item in news:
        if isinstance(item, TokenOutput):
            outputs.setdefault((prompt, item.choice), []).append(item)
        elif isinstance(item, PromptOutput):
            yield prompt, item  # what comes of a prompt is before its tokens
        else:
            overs.append((prompt, item))
    for (prompt, _), parts in outputs.items():
        yield prompt, parts[0] if len(parts) == 1 else _appended(parts)
    yield from overs


def _appended(parts: list[TokenOutput]) -> TokenOutput:
    first, last = parts[0], parts[-1]
    return TokenOutput(
        request_id=last.request_id,
        attempt=last.attempt,
        choice=last.choice,
        index=first.index,
        token_ids=tuple(chain.from_iterable([part.token_ids for part in parts])),
        logprobs=tuple(chain.from_iterable([part.logprobs for part in parts])),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
    )


def _joined(parts: list[Delta]) -> Delta:
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(item for part in parts for item in part.logprobs),
        prompt_logprobs=parts[0].prompt_logprobs,
    )
