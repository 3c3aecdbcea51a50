"""The answers of /v1/completions in OpenAI's form, with vLLM's token ids where asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.core.errors import PdserveError
from pdserve.core.request import TokenLogprobs
from pdserve.text.tokenizer import Tokenizer
from router.answer_format import (
    Json,
    TextEvents,
    ending_bytes,
    event_bytes,
    failure_bytes,
    json_logprob,
    timeline_json,
    usage_json,
)
from router.generation import Delta, Generation, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What the client asked for, beyond tokens."""

    streamed: bool
    include_usage: bool
    timeline: bool
    token_ids: bool
    echo: bool


class CompletionFormat:
    """Choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    def __init__(
        self,
        *,
        answer_id: str,
        model: str,
        created_s: int,
        tokenizer: Tokenizer,
        requests: Sequence[GenerationRequest],
        options: CompletionOptions,
    ) -> None:
        self._head: Json = {
            "id": answer_id,
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        self._tokenizer = tokenizer
        self._jobs = [request.job for request in requests]
        self._num_given = [request.num_given for request in requests]
        self._options = options
        self._text_offsets: dict[int, int] = {}  # of choices that were begun
        self._text_events: dict[int, TextEvents] = {}

    @property
    def streamed(self) -> bool:
        return self._options.streamed

    def whole(self, answers: Sequence[Delta], generation: Generation) -> Json:
        choices = [self._choice(delta) for delta in answers]
        body = {**self._head, "choices": choices, "usage": usage_json(generation.usage)}
        return body | (timeline_json(generation.overs) if self._options.timeline else {})

    def events(self, delta: Delta) -> bytes:
        index = self._index(delta)
        text_only = delta.finish_reason is None and not delta.logprobs
        if index not in self._text_offsets or not text_only or self._options.token_ids:
            return event_bytes(self._event([self._choice(delta)]))
        if not delta.text:
            return b""  # nothing to show yet
        if index not in self._text_events:
            self._text_events[index] = TextEvents(
                lambda text: self._event([self._choice(replace(delta, text=text))])
            )
        return self._text_events[index].bytes_of(delta.text)

    def ending(self, generation: Generation) -> bytes:
        return ending_bytes(self._last_event(generation))

    def failure(self, error: PdserveError) -> bytes:
        return failure_bytes(error)

    def _last_event(self, generation: Generation) -> Json | None:
        extra = timeline_json(generation.overs) if self._options.timeline else {}
        if self._options.include_usage:
            extra["usage"] = usage_json(generation.usage)
        return {**self._event([]), **extra} if extra else None

    def _event(self, choices: list[Json]) -> Json:
        usage: Json = {"usage": None} if self._options.include_usage else {}
        return {**self._head, "choices": choices, **usage}

    def _choice(self, delta: Delta) -> Json:
        index = self._index(delta)
        first = index not in self._text_offsets
        self._text_offsets.setdefault(index, 0)
        prompt_ids = self._jobs[delta.prompt].prompt_ids
        echoed = first and self._options.echo
        choice: Json = {
            "index": index,
            "text": self._echo(prompt_ids) + delta.text if echoed else delta.text,
            "logprobs": self._logprobs(index, delta) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._options.token_ids:
            choice["token_ids"] = list(delta.token_ids)
            choice["prompt_token_ids"] = list(prompt_ids) if first else None
        return choice

    def _index(self, delta: Delta) -> int:
        return delta.prompt * self._num_given[delta.prompt] + delta.choice

    def _echo(self, prompt_ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(prompt_ids, skip_special_tokens=True)

    def _logprobs(self, index: int, delta: Delta) -> Json:
        tokens = [self._tokenizer.token_text(token_id) for token_id in delta.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._text_offsets[index])
            self._text_offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [json_logprob(item.logprob) for item in delta.logprobs],
            "top_logprobs": [
                self._top(token, item) for token, item in zip(tokens, delta.logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token: str, item: TokenLogprobs) -> Json:
        """Texts of the likeliest tokens and of the sampled one; of equal texts the better one."""
        top: Json = {}
        for token_id, logprob in item.top:
            top.setdefault(self._tokenizer.token_text(token_id), json_logprob(logprob))
        top.setdefault(token, json_logprob(item.logprob))
        return top
