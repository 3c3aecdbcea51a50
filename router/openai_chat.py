"""The answers of /v1/chat/completions in OpenAI's form, with vLLM's token ids where asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.core.errors import PdserveError
from pdserve.text.tokenizer import Tokenizer
from router.answer_format import (
    Json,
    TextEvents,
    ending_bytes,
    event_bytes,
    failure_bytes,
    json_logprob,
    prompt_logprobs_json,
    timeline_json,
    usage_json,
)
from router.chat_calls import ChoiceCalls
from router.choice_text import Delta
from router.generation import Generation, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What the client asked for, beyond tokens."""

    streamed: bool
    include_usage: bool
    timeline: bool
    token_ids: bool
    prompt_logprobs: int | None  # the likeliest tokens of each; None: no log-probabilities


class ChatFormat:
    """One conversation; the first event of each choice says who speaks."""

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created_s: int,
        tokenizer: Tokenizer,
        request: GenerationRequest,
        options: ChatOptions,
    ) -> None:
        self._head: Json = {
            "id": answer_id,
            "object": "chat.completion.chunk" if options.streamed else "chat.completion",
            "created": created_s,
            "model": model,
        }
        self._tokenizer = tokenizer
        self._prompt_ids = request.job.prompt_ids
        self._calls = {
            choice: ChoiceCalls(request.calls)
            for choice in range(request.num_given)
            if request.calls is not None
        }
        self._options = options
        self._begun: set[int] = set()
        self._text_events: dict[int, TextEvents] = {}

    @property
    def streamed(self) -> bool:
        return self._options.streamed

    def whole(self, answers: Sequence[Delta], generation: Generation) -> Json:
        choices = [self._choice(delta, "message", self._message(delta)) for delta in answers]
        body = {**self._head, "choices": choices, "usage": usage_json(generation.usage)}
        return body | self._of_the_prompt(answers[0]) | self._timeline(generation)

    def events(self, delta: Delta) -> bytes:
        if delta.choice not in self._begun:
            return event_bytes(self._first_event(delta)) + self.events(delta)
        if self._calls:
            return self._events_with_calls(delta)
        if delta.finish_reason is not None or delta.logprobs or self._options.token_ids:
            content: Json = {"content": delta.text} if delta.text else {}
            return event_bytes(self._event([self._choice(delta, "delta", content)]))
        if not delta.text:
            return b""  # nothing to show yet
        if delta.choice not in self._text_events:
            self._text_events[delta.choice] = TextEvents(
                lambda text: self._event([self._choice(delta, "delta", {"content": text})])
            )
        return self._text_events[delta.choice].bytes_of(delta.text)

    def _events_with_calls(self, delta: Delta) -> bytes:
        """An event for each part; what else came with the delta goes with the last one."""
        is_last = delta.finish_reason is not None
        parts = self._calls[delta.choice].deltas(delta.text, is_last=is_last)
        if not parts and not (is_last or delta.logprobs or self._options.token_ids):
            return b""
        *parts, last = parts or [{}]
        early = replace(delta, token_ids=(), logprobs=(), finish_reason=None, stop_reason=None)
        choices = [self._choice(early, "delta", part) for part in parts]
        choices.append(self._choice(delta, "delta", last))
        return b"".join(event_bytes(self._event([choice])) for choice in choices)

    def ending(self, generation: Generation) -> bytes:
        return ending_bytes(self._last_event(generation))

    def failure(self, error: PdserveError) -> bytes:
        return failure_bytes(error)

    def _last_event(self, generation: Generation) -> Json | None:
        extra = self._timeline(generation)
        if self._options.include_usage:
            extra["usage"] = usage_json(generation.usage)
        return {**self._event([]), **extra} if extra else None

    def _first_event(self, delta: Delta) -> Json:
        first_of_all = not self._begun
        self._begun.add(delta.choice)
        begun: Json = {
            "index": delta.choice,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event([begun]) | (self._of_the_prompt(delta) if first_of_all else {})

    def _event(self, choices: list[Json]) -> Json:
        usage: Json = {"usage": None} if self._options.include_usage else {}
        return {**self._head, "choices": choices, **usage}

    def _choice(self, delta: Delta, name: str, content: Json) -> Json:
        choice: Json = {
            "index": delta.choice,
            name: content,
            "logprobs": self._logprobs(delta) if delta.logprobs else None,
            "finish_reason": self._finish_reason(delta),
            "stop_reason": delta.stop_reason,
        }
        if self._options.token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _finish_reason(self, delta: Delta) -> str | None:
        if calls := self._calls.get(delta.choice):
            return calls.finish_reason(delta.finish_reason)
        return delta.finish_reason

    def _message(self, delta: Delta) -> Json:
        if calls := self._calls.get(delta.choice):
            return calls.message(delta.text)
        return {"role": "assistant", "content": delta.text, "refusal": None}

    def _of_the_prompt(self, delta: Delta) -> Json:
        """What is told of the prompt with the first choice of all."""
        told: Json = {"prompt_token_ids": list(self._prompt_ids)} if self._options.token_ids else {}
        if (num_top := self._options.prompt_logprobs) is not None:
            told["prompt_logprobs"] = prompt_logprobs_json(
                delta, self._prompt_ids, num_top, self._tokenizer
            )
        return told

    def _timeline(self, generation: Generation) -> Json:
        return timeline_json(generation.overs) if self._options.timeline else {}

    def _logprobs(self, delta: Delta) -> Json:
        content = [
            {
                **self._token(token_id, item.logprob),
                "top_logprobs": [self._token(top_id, logprob) for top_id, logprob in item.top],
            }
            for token_id, item in zip(delta.token_ids, delta.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": json_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
