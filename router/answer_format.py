"""What an answer looks like on the wire, as far as all HTTP formats agree: the Protocol, usage,
timelines, and log-probabilities as JSON can hold them.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from pydantic_core import to_json

from pdserve.core.errors import PdserveError
from pdserve.core.timeline import Timeline
from pdserve.text.tokenizer import Tokenizer
from router.choice_text import Delta
from router.generation import Generation, Usage
from router.http_bodies import error_object
from router.inbox import RequestOver

Json = dict[str, object]

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI and vLLM use this for it


class AnswerFormat(Protocol):
    """Turns one call's deltas into JSON objects. One object serves one call."""

    @property
    def streamed(self) -> bool: ...

    def whole(self, answers: Sequence[Delta], generation: Generation) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def events(self, delta: Delta) -> bytes:
        """What a delta is in a stream: server-sent events, or nothing."""
        ...

    def ending(self, generation: Generation) -> bytes:
        """What comes after all deltas of a stream."""
        ...

    def failure(self, error: PdserveError) -> bytes:
        """How a stream ends that was begun and failed."""
        ...


def event_bytes(item: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(item) + b"\n\n"


def ending_bytes(last: Json | None) -> bytes:
    """How a stream of completions or chats ends; ``last`` comes after all deltas, if anything."""
    return (event_bytes(last) if last else b"") + DONE


def failure_bytes(error: PdserveError) -> bytes:
    """The last event of such a stream that failed."""
    return event_bytes(error_object(error))


class TextEvents:
    """Events that differ in one text only; all else is made into bytes once."""

    def __init__(self, event: Callable[[str], Json]) -> None:
        mark = uuid.uuid4().hex
        self._before, _, self._after = event_bytes(event(mark)).partition(to_json(mark))

    def bytes_of(self, text: str) -> bytes:
        return self._before + to_json(text) + self._after


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timeline_json(overs: Sequence[RequestOver]) -> Json:
    """``timeline`` of a call with one prompt, ``timelines`` of one with several."""
    if len(overs) == 1:
        return {"timeline": _timeline(overs[0])}
    return {"timelines": [_timeline(over) for over in overs]}


def prompt_logprobs_json(
    delta: Delta, prompt_ids: Sequence[int], num_top: int, tokenizer: Tokenizer
) -> list[Json | None] | None:
    """vLLM's ``prompt_logprobs``: for each token of the prompt its own and those of the ``num_top``
    likeliest, by token id; nothing for the first. None where the choice has no token.
    """
    if delta.prompt_logprobs is None:
        return None
    answer: list[Json | None] = [None]
    for token_id, item in zip(prompt_ids[1:], delta.prompt_logprobs, strict=True):
        shown: Json = {str(token_id): _ranked(tokenizer, token_id, item.logprob, item.rank)}
        for rank, (top_id, logprob) in enumerate(item.top[:num_top], start=1):
            shown.setdefault(str(top_id), _ranked(tokenizer, top_id, logprob, rank))
        answer.append(shown)
    return answer


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> Json:
    return {
        "logprob": json_logprob(logprob),
        "rank": rank,
        "decoded_token": tokenizer.token_text(token_id),
    }


def json_logprob(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _timeline(over: RequestOver) -> Json | None:
    timeline: Timeline | None = over.timeline
    if timeline is None:
        return None
    return {
        "route": timeline.route.value,
        "stages": [asdict(stage) for stage in timeline.stages],
        "nodes": list(dict.fromkeys(stage.node for stage in timeline.stages)),
        "kv_bytes": timeline.kv_bytes,
        "transport": timeline.transport,
        "num_preemptions": timeline.num_preemptions,
        "cached_tokens": timeline.cached_tokens,
        "num_attempts": over.num_attempts,
        "planned": over.planned and over.planned.value,
        "explain": over.explain,
    }
